# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's own arguments as the defaults of flags, for commands that look at what was trained.

Megatron's `--use-checkpoint-args` leaves many of them out (YaRN, QK norms, epsilons, tokenizer, block diffusion).
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_csbp import megatron_loading
from megatron_csbp.configuration.network_rules import settings_of_network

_BESIDE_THE_CONFIG = """
group_query_attention max_position_embeddings rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
yarn_correction_range_round_to_int mscale mscale_all_dim swiglu squared_relu quick_geglu openai_gelu
untie_embeddings_and_output_weights attention_softmax_in_fp32 hybrid_layer_pattern
heterogeneous_layers_config_encoded_json transformer_impl num_experts moe_grouped_gemm moe_router_load_balancing_type
bf16 fp16
"""
"""What makes a model the same beside the fields of Megatron's configuration, which carry their argument's name."""
_VOCABULARY = """
tokenizer_type tokenizer_model vocab_size vocab_file merge_file make_vocab_size_divisible_by padded_vocab_size
tiktoken_pattern tiktoken_num_special_tokens tokenizer_hf_no_use_fast
tokenizer_hf_no_include_special_tokens trust_remote_code
"""
_OBJECTIVE = """
query_scale_beta diffusion_block_size mask_token_id diffusion_objective clean_attention noise_schedule noise_eps
diffusion_loss_weight ar_loss_weight eod_mask_loss corrupted_views window_anchor
"""


def checkpoint_folder(load: str, ckpt_step: int | None) -> Path:
    """Return the folder of one iteration below the folder that `--load` names.

    Raises:
        ValueError: there is no such checkpoint.
    """
    tracker = Path(load) / "latest_checkpointed_iteration.txt"
    if ckpt_step is not None:
        name = f"iter_{ckpt_step:07d}"
    elif tracker.is_file():
        latest = tracker.read_text().strip()
        name = latest if latest == "release" else f"iter_{int(latest):07d}"
    else:
        raise ValueError(
            f"--load {load} is not a folder of Megatron checkpoints: it has no {tracker.name}. Give the folder that a "
            "training run has as its --save."
        )
    folder = Path(load) / name
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in Path(load).glob("iter_*"))) or "none"
        raise ValueError(f"--load {load} has no checkpoint {name}; it has {there}. Choose one with --ckpt-step.")
    return folder


def read_checkpoint_arguments(load: str, ckpt_step: int | None) -> Namespace:
    """Return the arguments in a checkpoint.

    Raises:
        ValueError: there is no checkpoint, or it holds no arguments.
    """
    folder = checkpoint_folder(load, ckpt_step)
    saved = megatron_loading.saved_arguments(folder)
    if saved is None:
        raise ValueError(
            f"--load {load}: {folder.name} holds no arguments of the run that saved it. Only torch_dist checkpoints "
            "(--ckpt-format torch_dist) can be read."
        )
    return saved


def named_checkpoint(argv: Sequence[str]) -> Namespace | None:
    """Return the arguments in the checkpoint that `--load` of a command line names; None if it asks for help.

    Raises:
        ValueError: `--load` is missing, or there is no such checkpoint.
    """
    if {"-h", "--help"} & set(argv):
        return None
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--load", default=None)
    parser.add_argument("--ckpt-step", type=int, default=None)
    named = parser.parse_known_args(list(argv))[0]
    if named.load is None:
        raise ValueError("--load is not given: the folder of checkpoints that a training run has as its --save.")
    return read_checkpoint_arguments(named.load, named.ckpt_step)


def set_defaults_from_checkpoint(parser: ArgumentParser, saved: Namespace) -> None:
    """Make what a checkpoint says of model, tokenizer and objective the parser's defaults; flags still win.

    Args:
        parser: parser with every flag of Megatron and of this package.
        saved: the checkpoint's arguments.
    """
    known = {action.dest: action for action in parser._actions}
    complete = Namespace(**{name: action.default for name, action in known.items()} | vars(saved))
    of_network = [name for name in settings_of_network(complete) if name in known]
    for name in [*of_network, *f"{_BESIDE_THE_CONFIG} {_VOCABULARY} {_OBJECTIVE}".split()]:
        value = getattr(saved, name, None)
        if name in known and value is not None:
            parser.set_defaults(**{name: value})
            known[name].required = False
    length = getattr(saved, "clean_seq_length", None) or saved.seq_length
    parser.set_defaults(seq_length=length)
