# SPDX-License-Identifier: Apache-2.0
"""Megatron's hooks, timers, writers and FLOPs statistics: the part of `megatron_compat` that measuring needs.

Its symbols are in `required_symbols.REQUIRED_SYMBOLS`. Nothing here imports Megatron until it is called.
"""

import copy
import functools
import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch


def arguments() -> Namespace:
    """Megatron's global arguments."""
    from megatron.training.global_vars import get_args

    args: Namespace = get_args()
    return args


def call_after_backward(model: Any, hook: Callable[[], None]) -> None:
    """Calls `hook` in each training iteration after all micro-batches' backward passes, on every rank.

    Megatron calls `config.finalize_model_grads_func` there, once the pipeline is empty, so a collective in `hook`
    cannot wait for a rank that waits for the pipeline. Call this from a training forward step: `train` has set the
    field by then.

    Args:
        model: Any (wrapped) stage of this rank; all share one config.
        hook: Called after Megatron's own function.
    """
    from megatron.core.utils import get_model_config

    config = get_model_config(model)
    finalize = config.finalize_model_grads_func
    assert finalize is not None, "Megatron sets finalize_model_grads_func before the first training step"

    @functools.wraps(finalize)
    def finalize_and_call(*positional: Any, **keywords: Any) -> Any:
        result = finalize(*positional, **keywords)
        hook()
        return result

    config.finalize_model_grads_func = finalize_and_call


def computes_loss(model: Any) -> bool:
    """Whether a stage has the output layer."""
    from megatron.core.utils import get_attr_wrapped_model

    return bool(get_attr_wrapped_model(model, "post_process"))


def is_counted_chunk(model: Any) -> bool:
    """Whether a stage is the one of this rank's model chunks by which micro-batches are counted.

    That is the one with the output layer or, on ranks that have none, the first.
    """
    from megatron.core.parallel_state import is_pipeline_last_stage

    if is_pipeline_last_stage(ignore_virtual=True):
        return computes_loss(model)
    from megatron.core.utils import get_attr_wrapped_model

    stage = get_attr_wrapped_model(model, "vp_stage")
    return stage is None or stage == 0


def stock_flops(args: Namespace, rows: float, squared_lengths: float) -> float:
    """Megatron's own count of the operations of one training step.

    Args:
        args: Megatron's validated arguments.
        rows: Rows that pass the layers and the output layer.
        squared_lengths: Sum of the squares of the lengths of causal sequences.
    """
    # A copy, since the function fills in the number of query groups.
    from megatron.training.training import num_floating_point_operations

    flops: float = num_floating_point_operations(
        copy.copy(args), 1, seqlen_squared_sum_in_batch=squared_lengths, total_real_tokens_in_batch=rows
    )
    return flops


def count_rows(rows: float, squared_lengths: float) -> None:
    """Adds to the statistics from which Megatron computes its FLOPs report of this iteration.

    Megatron takes them as the lengths of packed sequences, of which it needs the sum and the sum of squares; both are
    given here by lengths that alternate around their mean.

    Args:
        rows: Rows that pass the layers and the output layer.
        squared_lengths: Sum of the squares of the lengths of causal sequences.
    """
    couples = math.ceil(rows * rows / (2 * squared_lengths))  # fewer would have too large a square
    mean = rows / (2 * couples)
    deviation = math.sqrt(squared_lengths / (2 * couples) - mean * mean)
    lengths = torch.tensor([mean + deviation, mean - deviation], dtype=torch.float64).repeat(couples)
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    update_seqlen_stats_from_cu_seqlens(boundaries)


def global_batch_size() -> int:
    """Samples in the current iteration, over all ranks."""
    from megatron.core import num_microbatches_calculator as calculator

    size: int = calculator.get_current_running_global_batch_size()
    return size


def logged_training_seconds(is_first_line: bool) -> float:
    """Seconds of this run spent in training iterations up to Megatron's last log line; waits for no device.

    Args:
        is_first_line: Whether that line was Megatron's first, which does not set its timer back.
    """
    from megatron.training.global_vars import get_timers

    timer = get_timers()("interval-time")
    seconds: float = timer.active_time()
    # An evaluation or a checkpoint after the line has stopped the timer, which then counts what came in between.
    return seconds if is_first_line else seconds - float(timer._elapsed)


def log_timer(name: str, seconds: float, iterations: int, iteration: int, args: Namespace) -> None:
    """Logs a duration as Megatron logs its timers: over all ranks, to the log, TensorBoard and Weights & Biases.

    Every rank has to call it.

    Args:
        name: Name of the timer.
        seconds: What was measured on this rank since the last call.
        iterations: In how many iterations.
        iteration: Number of the iteration.
        args: Megatron's arguments.
    """
    from megatron.training.global_vars import get_timers

    timers = get_timers()
    timers(name, log_level=0).set_elapsed(seconds)
    for flag, writer in ((args.tensorboard_dir, _tensorboard_writer()), (args.wandb_project, _wandb_writer())):
        if flag:
            timers.write([name], writer, iteration, normalizer=iterations, reset=False)
    timers.log([name], normalizer=iterations)


def log_scalar(name: str, value: float, iteration: int) -> None:
    """Writes a number to TensorBoard and Weights & Biases on the rank that has the writers."""
    if (writer := _tensorboard_writer()) is not None:
        writer.add_scalar(name, value, iteration)
    if (writer := _wandb_writer()) is not None:
        writer.log({name: value}, iteration)


def print_on_last_rank(message: str) -> None:
    """Prints where Megatron prints its training log."""
    from megatron.training.utils import print_rank_last

    print_rank_last(message)


def _tensorboard_writer() -> Any:
    from megatron.training.global_vars import get_tensorboard_writer

    return get_tensorboard_writer()


def _wandb_writer() -> Any:
    from megatron.training.global_vars import get_wandb_writer

    return get_wandb_writer()
