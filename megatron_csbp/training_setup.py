# SPDX-License-Identifier: Apache-2.0
"""From a command line to what Megatron's `pretrain` takes: arguments, model config, datasets, forward step.

Import it after the CPU runtime is installed: it needs Megatron.
"""

import dataclasses
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Bound here, before `launch` rebinds the name in its module.
from megatron.training.argument_utils import gpt_config_from_args

from megatron_csbp import (
    arguments,
    check_mode,
    megatron_arguments,
    megatron_checkpoints,
    megatron_compat,
    megatron_delta_net,
    megatron_loading,
    megatron_start,
)
from megatron_csbp.agreement.exchange import check_agreement, job_store
from megatron_csbp.agreement.start_facts import start_facts
from megatron_csbp.configuration.argument_rules import check_vocabulary
from megatron_csbp.configuration.changes import Change
from megatron_csbp.configuration.checkpoint_rules import Start, check_files, check_start, use_checkpoint_length
from megatron_csbp.configuration.config_file import flags_given, set_defaults_from_yaml, take_yaml_flag
from megatron_csbp.configuration.flag_names import FlagNames
from megatron_csbp.configuration.hardware_queues import check_one_queue
from megatron_csbp.configuration.hub_rules import check_hub_tokenizer
from megatron_csbp.configuration.mask_token_rules import fill_mask_token, good_mask_token
from megatron_csbp.configuration.new_row_rules import choose_new_rows, new_rows_of_next_load
from megatron_csbp.configuration.objective_flags import objective_from_args
from megatron_csbp.configuration.output_folders import check_output_folders
from megatron_csbp.configuration.own_geometries import prepare_own_geometries
from megatron_csbp.configuration.performance_arguments import (
    fill_head_groups,
    fill_loss_chunk_rows,
    why_last_layer_is_whole,
)
from megatron_csbp.configuration.run_lock import check_lock, hold_lock
from megatron_csbp.configuration.runtime_arguments import adapt_to_runtime
from megatron_csbp.configuration.training_rules import check_training
from megatron_csbp.configuration.weight_rules import check_weights
from megatron_csbp.cpu_runtime import RuntimeInfo
from megatron_csbp.data.datasets import SampleOf, build_train_valid_test_datasets
from megatron_csbp.data.full_validation import correct_full_validation_now
from megatron_csbp.data.validation import validate_data_files
from megatron_csbp.errors import failure_in_words, say_errors_in_one_line, user_errors
from megatron_csbp.forward_step import BlockDiffusionForwardStep
from megatron_csbp.model import BlockDiffusionModelConfig
from megatron_csbp.reporting.instruments import instruments_from_args
from megatron_csbp.reporting.start_summary import print_start_summary
from megatron_csbp.torch_adam import correct_distributed_optimizer_now
from megatron_csbp.transformer.core_attention import GRAD_REDUCE_DTYPES, BlockDiffusionSettings
from megatron_csbp.transformer.geometry.visibility import CleanAttention, WindowAnchor
from megatron_csbp.transformer.query_scale import query_scale

ArgsProvider = Callable[[ArgumentParser], ArgumentParser]


def parse_and_validate_args(
    runtime: RuntimeInfo,
    extra_args_provider: ArgsProvider | None = None,
    args_defaults: dict[str, Any] | None = None,
    set_defaults: Callable[[ArgumentParser], None] | None = None,
    yaml_path: Path | None = None,
    changes: list[Change] | None = None,
) -> Namespace:
    """Parse Megatron's flags and ours, check every rule, and print the start summary on rank 0.

    Args:
        runtime: the device that was chosen.
        extra_args_provider: further flags, as for Megatron's function of the same name.
        args_defaults: as for Megatron's function.
        set_defaults: changes the defaults of the whole parser.
        yaml_path: what `--yaml-cfg` names, if it is no longer on the command line.
        changes: takes what is changed among the arguments.

    Raises:
        ValueError: a rule is broken or a flag unknown, on every rank, before any collective.
    """
    from_command_line, sys.argv[1:] = take_yaml_flag(sys.argv[1:])
    yaml_path = yaml_path or from_command_line
    given, changes = flags_given(sys.argv[1:]), [] if changes is None else changes
    parsers: list[ArgumentParser] = []

    def add_flags(parser: ArgumentParser) -> ArgumentParser:
        parser = arguments.add_arguments(parser if extra_args_provider is None else extra_args_provider(parser))
        megatron_arguments.make_help_printable(parser)
        say_errors_in_one_line(parser)
        parsers.append(parser)
        if set_defaults is not None:
            set_defaults(parser)
        if yaml_path is not None:
            given.update(set_defaults_from_yaml(parser, yaml_path))
        return parser

    def before(args: Namespace) -> None:
        _check_device(args, runtime)
        if args.use_checkpoint_args and "--seq-length" not in given:
            use_checkpoint_length(args)
        changes.extend(adapt_to_runtime(args, runtime, is_dry_run(args)))
        changes.extend(arguments.prepare_before_validation(args, frozenset(given)))
        check_training(args)
        check_hub_tokenizer(args)
        check_output_folders(args, makes_them=not is_dry_run(args))
        check_mode.leave_reporting_out(args)

    def after(args: Namespace) -> None:
        changes.extend(_after_validation(args))

    args = megatron_arguments.parse_and_validate_arguments(add_flags, args_defaults or {}, check_files, before, after)
    if arguments.is_block_diffusion(args):
        _set_up_block_diffusion(args)
    start = _agreed_start(args, FlagNames(parsers[-1]))
    keep_others_out(args)
    print_start_summary(args, runtime, changes, start)
    return args


def _with_new_rows(args: Namespace, start: Start) -> Start:
    """Decide how rows of the vocabulary start that are not trained, and note it for the summary."""
    is_text = megatron_start.token_of(args.mask_token_id).is_text
    note = choose_new_rows(args, start, megatron_start.vocab_size(), is_text)
    return start if note is None else dataclasses.replace(start, notes=[*start.notes, note])


def _after_validation(args: Namespace) -> list[Change]:
    """Fill in what needs validated arguments and a tokenizer."""
    changes: list[Change] = []
    if arguments.is_block_diffusion(args):
        changes.extend(fill_mask_token(args, *megatron_start.mask_tokens(args.padded_vocab_size)))
    changes.extend(arguments.prepare_after_validation(args))
    if arguments.is_block_diffusion(args) and has_own_geometries(args):
        changes.extend(prepare_own_geometries(args))
    return changes


def _check_device(args: Namespace, runtime: RuntimeInfo) -> None:
    """The device is chosen before a YAML file is read, and on CUDA streams may have to share one hardware queue."""
    if args.device not in ("auto", runtime.device):
        raise ValueError(
            f"--device {args.device} in a --yaml-cfg file comes too late: the device is chosen before Megatron is "
            f"imported. Give --device {args.device} on the command line."
        )
    if runtime.device == "cuda":
        capability = torch.cuda.get_device_properties(0).major
        check_one_queue(args, capability, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))


def _set_up_block_diffusion(args: Namespace) -> None:
    """Check and fill in what needs tokenizer and validated arguments; correct Megatron where it has no seam."""
    check_vocabulary(args, megatron_start.eod_token_id())
    plans = arguments.static_plans(args, rank=0)
    fill_head_groups(args, [plans.plan(mask) for mask in arguments.masks(args)])
    fill_loss_chunk_rows(args)
    args.csbp_whole_last_layer = why_last_layer_is_whole(
        args,
        objective_from_args(args).loss_on_clean_rows,
        attends=args.num_layers in megatron_delta_net.attention_layers(args),
    )
    advice = good_mask_token(args.mask_token_id, *megatron_start.mask_tokens(args.padded_vocab_size))
    tokenizer = None if check_mode.leaves_data_open(args) else megatron_loading.tokenizer()
    validate_data_files(args, tokenizer, advice)
    correct_distributed_optimizer_now()
    if args.full_validation:
        correct_full_validation_now(args)
    megatron_checkpoints.save_clean_length()


def _agreed_start(args: Namespace, flags: FlagNames) -> Start:
    """Hold the run against its checkpoint, and compare with all other ranks before any process group is made.

    Raises:
        ValueError: the checkpoint does not fit; or ranks start differently, or one does not come, on every rank.
    """
    start = check_start(args, flags)
    if arguments.is_block_diffusion(args):
        start = _with_new_rows(args, start)
    # Without an address Megatron says itself what is missing.
    if args.world_size > 1 and not is_dry_run(args) and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        timeout_s = 60.0 * args.distributed_timeout_minutes
        store = job_store(os.environ, timeout_s)
        check_agreement(store, args.rank, args.world_size, start_facts(args, start, flags), timeout_s)
    return start


def keep_others_out(args: Namespace) -> None:
    """Keep other runs out of the folder that this one saves into.

    Raises:
        ValueError: another run saves there.
    """
    if args.save is not None and "://" not in args.save and not args.skip_train:
        check_lock(args.save)
        if args.rank == 0 and not is_dry_run(args):
            hold_lock(args.save)


def is_dry_run(args: Namespace) -> bool:
    """Return whether only checks are asked for."""
    return args.csbp_dry_run is not None


def end_dry_run(args: Namespace) -> None:
    """Check, in a dry run, also Megatron's own configuration of the model, and stop.

    Raises:
        ValueError: Megatron refuses it.
        SystemExit: with status 0; not in a run that is none.
    """
    if is_dry_run(args):
        with failure_in_words("check of the model"):
            model_config_from_args(args) if arguments.is_block_diffusion(args) else gpt_config_from_args(args)
    check_mode.end(args)


def model_config_from_args(args: Namespace, **kwargs: Any) -> Any:
    """Return Megatron's GPT model config with the block-diffusion settings of the flags.

    Args:
        args: validated arguments.
        **kwargs: passed on to Megatron's `gpt_config_from_args`.
    """
    config = gpt_config_from_args(args, model_config_cls=BlockDiffusionModelConfig, **kwargs)
    config.block_diffusion = BlockDiffusionSettings(
        sample=arguments.static_sample(args),
        sharding=arguments.sharding(args),
        clean_attention=CleanAttention(args.clean_attention),
        window_anchor=WindowAnchor(args.window_anchor),
        backend=args.csbp_attention_backend,
        num_head_groups=args.csbp_head_groups,
        grad_reduce_dtype=GRAD_REDUCE_DTYPES[args.csbp_grad_reduce_dtype],
        last_layer_drops_clean_rows=args.csbp_whole_last_layer is None,
        query_scale=query_scale(args.query_scale_beta, args.yarn_original_max_position_embeddings),
        delta_net_backend=args.csbp_delta_net_backend,
        delta_net_state_bytes=args.csbp_delta_net_state_mib * 2**20,
    )

    def check(models: list[Any], pipeline_group: Any) -> None:
        with user_errors():
            check_weights(args, models, pipeline_group)

    config.check_weights = check
    config.new_rows = partial(new_rows_of_next_load, args)
    return config


def sample_of_from_args(args: Namespace) -> SampleOf | None:
    """Return the geometry of single samples; None: all have that of the flags.

    Megatron's datasets cut whole samples of one document. Whoever brings data of another kind (documents with edges,
    few active blocks) puts a function of its own here before the entry runs.
    """
    return None


def has_own_geometries(args: Namespace) -> bool:
    """Return whether samples differ in their geometry: packed documents, or `sample_of_from_args`."""
    return bool(args.pack_documents) or sample_of_from_args(args) is not None


def datasets_provider(args: Namespace) -> Callable[..., Any]:
    """Return the `train_valid_test_dataset_provider` that yields the rows of this rank."""
    sample_of = sample_of_from_args(args)
    on_every_stage = args.full_validation or has_own_geometries(args)

    def provide(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
        return build_train_valid_test_datasets(
            args,
            num_samples,
            arguments.static_plans(args, megatron_compat.context_parallel_rank()),
            objective_from_args(args),
            vp_stage=vp_stage,
            is_built=partial(megatron_compat.rank_loads_data, vp_stage, on_every_stage=on_every_stage),
            sample_of=sample_of,
            plan_keys=arguments.plan_keys(args),
        )

    provide.is_distributed = True  # type: ignore[attr-defined]  # Megatron then builds the datasets on every rank
    return provide


def forward_step_from_args(args: Namespace) -> BlockDiffusionForwardStep:
    """Return the `forward_step_func` of the flags' objective."""
    return BlockDiffusionForwardStep(args, objective_from_args(args), instruments_from_args(args))
