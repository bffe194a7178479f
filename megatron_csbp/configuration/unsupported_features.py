# SPDX-License-Identifier: Apache-2.0
"""Megatron features that a block-diffusion run refuses by name. Imports nothing of Megatron."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Unsupported:
    """A Megatron feature that would be dropped or computed wrongly.

    Attributes:
        name: attribute of the argument namespace (absent in another Megatron version: nothing to refuse).
        reason: why it is refused.
        instead: what works.
        is_off: values that do not ask for the feature.
    """

    name: str
    reason: str
    instead: str = "leave the flag out"
    is_off: Callable[[object], bool] = lambda value: not value

    @property
    def flag(self) -> str:
        """The feature as the user spells it."""
        return f"--{self.name.replace('_', '-')}"


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


_TWO_COPIES = "its layers do not know two copies of a sequence"
_DOCUMENTS = "document masks are not in the attention plan"
_GRAPHS = "the exchange of keys and values runs outside a CUDA graph"
_GTP = "the block-parallel groups are not laid out for generalized tensor parallelism"
_FP8 = "FP8 tiles cannot be merged exactly"
_SKIPPED = "Megatron skips an iteration by cutting its stock batches"
_LOGITS = "no tile knows the largest logit of a row"
_USE_DISTRIBUTED_OPTIMIZER = "use --use-distributed-optimizer"

UNSUPPORTED = (
    Unsupported("mtp_num_layers", "multi-token prediction shifts one causal sequence, not two copies"),
    Unsupported("multi_latent_attention", "latent keys have no tiles here", "use --group-query-attention"),
    Unsupported("fp8_dot_product_attention", _FP8, "leave the flag out (FP8 linear layers are not affected)"),
    Unsupported("fp8_multi_head_attention", _FP8, "leave the flag out (FP8 linear layers are not affected)"),
    Unsupported("cuda_graph_impl", _GRAPHS, "use --cuda-graph-impl none", _one_of(None, "none")),
    Unsupported("enable_cuda_graph", _GRAPHS),
    Unsupported("external_cuda_graph", _GRAPHS),
    Unsupported("rampup_batch_size", "Megatron 0.19 ignores it", "use --step-batch-size-schedule"),
    Unsupported("iterations_to_skip", _SKIPPED),
    Unsupported("result_rejected_tracker_filename", f"it skips iterations, and {_SKIPPED}"),
    Unsupported(
        "dataloader_type",
        "its batches would not be cut into the rows of a rank",
        "use --dataloader-type single or cyclic",
        _one_of(None, "single", "cyclic"),
    ),
    Unsupported(
        "ckpt_format",
        "what a resumed run must keep is read from torch_dist checkpoints",
        "use --ckpt-format torch_dist",
        _one_of(None, "torch_dist"),
    ),
    Unsupported(
        "ddp_average_in_collective", "ranks count different numbers of tokens: gradients are summed, not averaged"
    ),
    Unsupported(
        "init_model_with_meta_device",
        "without FSDP Megatron never gives such weights a value",
        "leave the flag out, or use --use-cpu-initialization",
    ),
    Unsupported("sft", "stock packed SFT has no diffusion blocks within documents", "pretrain on --data-path"),
    Unsupported("fim_data", "fill-in-the-middle reorders the tokens of a sample"),
    Unsupported("allow_ambiguous_pad_tokens", "padding is known by its place; a pad token in the data is a token"),
    Unsupported(
        "softmax_type",
        "attention sinks would be counted once a tile",
        "use --softmax-type vanilla",
        _one_of(None, "vanilla"),
    ),
    Unsupported("qk_clip", _LOGITS),
    Unsupported("log_max_attention_logit", _LOGITS),
    Unsupported("apply_query_key_layer_scaling", "the scale is the same in every layer"),
    Unsupported(
        "experimental_attention_variant",
        _TWO_COPIES,
        "use gated_delta_net or leave the flag out",
        _one_of(None, "gated_delta_net"),
    ),
    Unsupported("hybrid_layer_pattern", _TWO_COPIES),
    Unsupported("heterogeneous_layers_config_path", "heterogeneous layer specs are not rewritten"),
    Unsupported("heterogeneous_layers_config_encoded_json", "heterogeneous layer specs are not rewritten"),
    Unsupported(
        "cp_comm_type",
        "the exchange is a gather and a reduce-scatter of this package",
        is_off=_one_of(None, "p2p", ["p2p"]),
    ),
    Unsupported("hybrid_context_parallel", "its groups change between micro-batches"),
    Unsupported("hierarchical_context_parallel_sizes", "there is one exchange over the whole context group"),
    Unsupported("gtp_weight_remat_size", _GTP, "leave it at 1", _one_of(None, 0, 1)),
    Unsupported("expert_gtp_weight_remat_size", _GTP, "leave it at 1", _one_of(None, 0, 1)),
    Unsupported("dataloader_inter_document_masking", _DOCUMENTS),
    Unsupported("reset_attention_mask", _DOCUMENTS),
    Unsupported("reset_position_ids", "positions come from the documents of a sample"),
    Unsupported("overlap_moe_expert_parallel_comm", "its schedule plan computes the loss of every row"),
    Unsupported("use_megatron_fsdp", "it is not tested", _USE_DISTRIBUTED_OPTIMIZER),
    Unsupported("use_torch_fsdp2", "it is not tested", _USE_DISTRIBUTED_OPTIMIZER),
    Unsupported("perform_rl_step", "there is no sampler of block-diffusion models here"),
    Unsupported("defer_embedding_wgrad_compute", "the loss calls the output layer in chunks, and some twice"),
    Unsupported("logits_load_dir", "cached logits have no corrupted rows"),
    Unsupported(
        "attention_backend",
        "it puts Megatron's own causal attention into every layer",
        "use --attention-backend auto",
        lambda value: getattr(value, "name", value) != "local",
    ),
)
