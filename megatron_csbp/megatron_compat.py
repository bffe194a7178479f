# SPDX-License-Identifier: Apache-2.0
"""Every touch of a Megatron or Transformer Engine symbol that is not public API.

The table in `megatron_csbp.required_symbols` names each such symbol, and a contract test checks them one by one.
To use another symbol, add a function here that wraps it, and a row there.

Nothing here imports Megatron until it is called: `megatron_csbp.cpu_runtime.install` has to run first.
"""

import contextlib
import functools
import importlib
import inspect
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_csbp.required_symbols import REQUIRED_SYMBOLS, RequiredSymbol, check_megatron_version, megatron_version

# Passed on, so that callers need to know one module.
__all__ = ["REQUIRED_SYMBOLS", "RequiredSymbol", "check_megatron_version", "megatron_version"]


def ensure_dataset_helpers() -> None:
    """Keep Megatron from compiling its dataset index builder where that is already compiled.

    Megatron runs `make` at every start. The wheel has the compiled module but no Makefile, so the run would end
    there, with CUDA or without. In a source checkout, which has the Makefile, Megatron compiles as usual.

    Raises:
        ImportError: If there is neither the compiled module nor a Makefile.
    """
    from megatron.core.datasets import utils

    folder = Path(inspect.getfile(utils)).parent
    if (folder / "Makefile").exists():
        return
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise ImportError(
            f"Megatron's dataset index builder helpers_cpp is not compiled and {folder} has no Makefile: {error}; "
            "reinstall megatron-core from a wheel for this Python version, or use a source checkout"
        ) from error
    setattr(utils, "compile_helpers", _already_compiled)  # noqa: B010


def _already_compiled() -> None:
    """Stand in for Megatron's `compile_helpers` where the compiled module exists."""


def context_parallel_rank() -> int:
    """Return the rank of this process in its context group."""
    from megatron.core.parallel_state import get_context_parallel_rank

    rank: int = get_context_parallel_rank()
    return rank


def current_device() -> torch.device:
    """Return the device that Megatron's tensors live on (on the CPU runtime `torch.cuda` answers with the CPU)."""
    return torch.empty(0, device=torch.cuda.current_device()).device


def first_vocabulary_id(local_vocab_size: int, padded_vocab_size: int) -> int:
    """Return the first token id whose logit this tensor-parallel rank holds."""
    from megatron.core import parallel_state as mpu

    rank: int = mpu.get_tensor_model_parallel_rank()
    return 0 if local_vocab_size == padded_vocab_size else rank * local_vocab_size


def stage_needs_batch(model: Any) -> bool:
    """Return whether a pipeline stage embeds tokens or computes the loss."""
    from megatron.core import utils

    return bool(
        utils.get_attr_wrapped_model(model, "pre_process") or utils.get_attr_wrapped_model(model, "post_process")
    )


@contextlib.contextmanager
def batch_timer() -> Iterator[None]:
    """Return Megatron's `batch-generator` timer, which `pretrain` requires of a forward step."""
    from megatron.training.global_vars import get_timers

    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    yield
    timer.stop()


def check_loss(loss: Tensor, args: Namespace) -> None:
    """Let Megatron's rerun machine stop or diagnose a NaN, infinite or (on request) spiky local loss."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=functools.partial(machine.is_unexpectedly_large, threshold=10, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def gather_sequence(hidden_states: Tensor, config: Any) -> Tensor:
    """Gather sequence-parallel rows, so that single rows can be picked for `output_layer_of_whole_rows`.

    Args:
        hidden_states: Rows of this rank, [S / tensor-parallel size, B, H] with sequence parallelism, else [S, B, H].
        config: the model's `TransformerConfig`.

    Returns:
        [S, B, H], on every tensor-parallel rank.
    """
    if not config.sequence_parallel:
        return hidden_states
    from megatron.core import tensor_parallel as mappings

    # The output layer all-reduces its input gradient, so the gather's own backward only takes this rank's part.
    gathered: Tensor = mappings.gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    return gathered


@contextlib.contextmanager
def output_layer_of_whole_rows(output_layer: Any, config: Any) -> Iterator[None]:
    """While open, the output layer takes rows that are whole on every tensor-parallel rank, and gathers nothing.

    Args:
        output_layer: Megatron's `ColumnParallelLinear`.
        config: the model's `TransformerConfig`.
    """
    output_layer.sequence_parallel = False
    try:
        yield
    finally:
        output_layer.sequence_parallel = config.sequence_parallel


def rank_loads_data(vp_stage: int | None = None, on_every_stage: bool = False) -> bool:
    """Return whether this rank reads samples: its stage embeds tokens or computes the loss, or all stages do.

    Every tensor-parallel rank reads for itself: it then knows all sizes on the host, and nothing is broadcast.
    """
    return on_every_stage or rank_loads_data_group(vp_stage)


def rank_loads_data_group(vp_stage: int | None = None) -> bool:
    """Return whether this rank's stage gets samples in any case: it embeds tokens or computes the loss."""
    from megatron.training import utils

    return bool(utils.is_first_or_last_pipeline_stage(vp_stage))


def local_norm_class() -> type:
    """Return the norm that Megatron's local layer specs use where Apex is absent."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm: type = WrappedTorchNorm
    return norm


def block_submodules(config: Any, spec: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
    """Turn a layer spec into the spec of the block of layers that this pipeline stage builds.

    Args:
        config: Megatron's `TransformerConfig`.
        spec: `ModuleSpec` of a layer; a block spec is returned as it is.
        vp_stage: Virtual pipeline stage, for the interleaved schedule.
        pp_rank: Pipeline rank; this rank's by default.

    Returns:
        `TransformerBlockSubmodules` with the layers and the final norm.
    """
    from megatron.core.transformer import transformer_block as block

    return block._get_block_submodules(config, spec, vp_stage, pp_rank)


def next_autoregressive_batch(
    data_iterator: Iterator[dict[str, Tensor]] | None, model: Any, args: Namespace
) -> dict[str, Tensor | None] | None:
    """Return the next micro-batch of an autoregressive run, cut to this context-parallel rank; None on a middle stage.

    Args:
        data_iterator: Yields samples of a GPT dataset; used on the first tensor-parallel rank only.
        model: the (wrapped) GPT stage.
        args: Megatron's arguments.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core import utils

    if not rank_loads_data_group(utils.get_attr_wrapped_model(model, "vp_stage")):
        return None
    batch: dict[str, Tensor | None] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        keys = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
        batch = {key: sample[key].cuda(non_blocking=True) if key in sample else None for key in keys}
    batch = utils.get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = {key: batch.get(key) for key in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")}
    on_this_rank: dict[str, Tensor | None] = utils.get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
        use_per_sequence_balancing=False,
    )
    return on_this_rank
