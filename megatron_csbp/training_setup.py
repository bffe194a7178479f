# SPDX-License-Identifier: Apache-2.0
"""From a command line to what Megatron's `pretrain` takes: arguments, model config, datasets, forward step.

Import it after the CPU runtime is installed: it needs Megatron.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# Bound here, before `launch` rebinds the name in its module.
from megatron.training.argument_utils import gpt_config_from_args

from megatron_csbp import arguments, megatron_compat, megatron_start
from megatron_csbp.configuration.argument_rules import check_vocabulary
from megatron_csbp.configuration.changes import Change
from megatron_csbp.configuration.checkpoint_rules import check_resume, use_checkpoint_length
from megatron_csbp.configuration.config_file import flags_given, set_defaults_from_yaml, take_yaml_flag
from megatron_csbp.configuration.objective_flags import objective_from_args
from megatron_csbp.configuration.performance_arguments import (
    fill_head_groups,
    fill_loss_chunk_rows,
    why_last_layer_is_whole,
)
from megatron_csbp.configuration.runtime_arguments import adapt_to_runtime
from megatron_csbp.cpu_runtime import RuntimeInfo
from megatron_csbp.data.datasets import build_train_valid_test_datasets
from megatron_csbp.data.validation import validate_data_files
from megatron_csbp.errors import say_errors_in_one_line
from megatron_csbp.forward_step import BlockDiffusionForwardStep
from megatron_csbp.model import BlockDiffusionModelConfig
from megatron_csbp.reporting.instruments import instruments_from_args
from megatron_csbp.reporting.start_summary import print_start_summary
from megatron_csbp.torch_adam import correct_distributed_optimizer_now
from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention
from megatron_csbp.transformer.core_attention import GRAD_REDUCE_DTYPES, BlockDiffusionSettings
from megatron_csbp.transformer.layout import BlockAssignment, Scheme

ArgsProvider = Callable[[ArgumentParser], ArgumentParser]


def parse_and_validate_args(
    runtime: RuntimeInfo, extra_args_provider: ArgsProvider | None = None, args_defaults: dict[str, Any] | None = None
) -> Namespace:
    """Parse Megatron's flags and ours, check every rule, and print the start summary on rank 0.

    Args:
        runtime: the device that was chosen.
        extra_args_provider: further flags, as for Megatron's function of the same name.
        args_defaults: as for Megatron's function.

    Raises:
        ValueError: a rule is broken or a flag unknown, on every rank, before any collective.
    """
    yaml_path, sys.argv[1:] = take_yaml_flag(sys.argv[1:])
    given: set[str] = flags_given(sys.argv[1:])
    changes: list[Change] = []

    def add_flags(parser: ArgumentParser) -> ArgumentParser:
        parser = extra_args_provider(parser) if extra_args_provider is not None else parser
        parser = arguments.add_arguments(parser)
        megatron_compat.make_help_printable(parser)
        say_errors_in_one_line(parser)
        if yaml_path is not None:
            given.update(set_defaults_from_yaml(parser, yaml_path))
        return parser

    def before(args: Namespace) -> None:
        if args.device not in ("auto", runtime.device):
            raise ValueError(
                f"--device {args.device} in a --yaml-cfg file comes too late: the device is chosen before Megatron is "
                f"imported. Give --device {args.device} on the command line."
            )
        if args.use_checkpoint_args and "--seq-length" not in given:
            use_checkpoint_length(args)
        changes.extend(adapt_to_runtime(args, runtime))
        changes.extend(arguments.prepare_before_validation(args, frozenset(given)))

    def after(args: Namespace) -> None:
        changes.extend(arguments.prepare_after_validation(args))

    args = megatron_compat.parse_and_validate_arguments(add_flags, args_defaults or {}, before, after)
    if arguments.is_block_diffusion(args):
        check_vocabulary(args, megatron_start.eod_token_id())
        layout = arguments.sequence_layout(args, rank=0)
        fill_head_groups(args, AttentionPlan(layout, CleanAttention(args.clean_attention)))
        fill_loss_chunk_rows(args)
        args.csbp_whole_last_layer = why_last_layer_is_whole(args, objective_from_args(args).loss_on_clean_rows)
        validate_data_files(args)
        correct_distributed_optimizer_now()
    check_resume(args)
    print_start_summary(args, runtime, changes)
    return args


def model_config_from_args(args: Namespace, **kwargs: Any) -> Any:
    """Return Megatron's GPT model config with the block-diffusion settings of the flags.

    Args:
        args: validated arguments.
        **kwargs: passed on to Megatron's `gpt_config_from_args`.
    """
    config = gpt_config_from_args(args, model_config_cls=BlockDiffusionModelConfig, **kwargs)
    config.block_diffusion = BlockDiffusionSettings(
        sequence_length=args.clean_seq_length,
        block_size=args.diffusion_block_size,
        scheme=Scheme(args.diffusion_scheme),
        assignment=BlockAssignment(args.block_assignment),
        clean_attention=CleanAttention(args.clean_attention),
        backend=args.csbp_attention_backend,
        num_head_groups=args.csbp_head_groups,
        grad_reduce_dtype=GRAD_REDUCE_DTYPES[args.csbp_grad_reduce_dtype],
        last_layer_drops_clean_rows=args.csbp_whole_last_layer is None,
        delta_net_backend=args.csbp_delta_net_backend,
        delta_net_state_bytes=args.csbp_delta_net_state_mib * 2**20,
    )
    return config


def datasets_provider(args: Namespace) -> Callable[..., Any]:
    """Return the `train_valid_test_dataset_provider` that yields the rows of this rank."""

    def provide(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
        return build_train_valid_test_datasets(
            args,
            num_samples,
            arguments.sequence_layout(args, megatron_compat.context_parallel_rank()),
            objective_from_args(args),
            vp_stage=vp_stage,
            is_built=partial(megatron_compat.rank_loads_data, vp_stage),
        )

    provide.is_distributed = True  # type: ignore[attr-defined]  # Megatron then builds the datasets on every rank
    return provide


def forward_step_from_args(args: Namespace) -> BlockDiffusionForwardStep:
    """Return the `forward_step_func` of the flags' objective."""
    return BlockDiffusionForwardStep(args, objective_from_args(args), instruments_from_args(args))
