# SPDX-License-Identifier: Apache-2.0
"""Entry: `torchrun ... -m megatron_csbp.pretrain_gpt <Megatron arguments> --bp-size P --diffusion-block-size M ...`.

Runs Megatron's own `pretrain`. Without block-diffusion flags it trains the plain autoregressive GPT.
"""

import dataclasses
import os
import sys
import time
from argparse import Namespace
from typing import Any

_PROGRAM_START_TIME = time.time()


def main() -> None:
    """Choose the device, then hand over to Megatron."""
    from megatron_csbp import check_mode, cpu_runtime
    from megatron_csbp.arguments import is_block_diffusion, read_device
    from megatron_csbp.configuration.hardware_queues import set_one_queue
    from megatron_csbp.errors import check_launcher, hush_optional_packages, user_errors

    hush_optional_packages()
    with user_errors():
        check_mode.stand_in_for_launcher(sys.argv[1:])
        check_launcher(sys.argv[1:])
        queues = set_one_queue(sys.argv[1:], os.environ)
        runtime = cpu_runtime.install(read_device(sys.argv[1:]))  # type: ignore[arg-type]
        if queues is not None and runtime.device == "cuda":
            runtime = dataclasses.replace(runtime, notes=(*runtime.notes, queues))

        from megatron_csbp import autoregressive, megatron_compat, training_setup

        megatron_compat.check_megatron_version()
        megatron_compat.ensure_dataset_helpers()
        args = training_setup.parse_and_validate_args(runtime, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
        if not is_block_diffusion(args):
            autoregressive.check_supported(args)
        training_setup.end_dry_run(args)
    run(args)


def run(args: Namespace) -> None:
    """Train or evaluate as the arguments say.

    Args:
        args: validated arguments, which are also Megatron's global ones.
    """
    main_entry_time = time.time()

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_csbp import autoregressive, training_setup
    from megatron_csbp.agreement.exchange import store_after_restart
    from megatron_csbp.agreement.failures import naming_failures
    from megatron_csbp.arguments import is_block_diffusion
    from megatron_csbp.reporting.instruments import closing

    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=main_entry_time)
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    if is_block_diffusion(args):
        model_config = training_setup.model_config_from_args(args)
        provider = training_setup.datasets_provider(args)
        forward_step: Any = training_setup.forward_step_from_args(args)
        measured = closing(forward_step.instruments)
    else:
        model_config = gpt_config_from_args(args)
        provider, forward_step = autoregressive.datasets_provider, autoregressive.forward_step
        measured = closing(None)
    container = pretrain_cfg_container_from_args(args, model_config)
    store = store or store_after_restart(os.environ, 60.0 * args.distributed_timeout_minutes)
    with measured, naming_failures(os.environ, args.rank, args.world_size):
        pretrain(container, provider, ModelType.encoder_or_decoder, forward_step, store=store)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)()
