# SPDX-License-Identifier: Apache-2.0
"""One line of progress for each log interval: how far, how fast, and how much of the hardware.

It follows Megatron's own line of the same iteration, which has the losses. It costs no synchronisation: Megatron's
timer of the interval has just been read, and everything else is known on the host.
"""

from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_csbp import megatron_compat, megatron_reporting
from megatron_csbp.reporting.model_flops import ModelFlops

PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
}
"""Dense bf16 peak by a part of the device's name (NVIDIA's data sheets); the first that fits."""


@dataclass(frozen=True)
class Interval:
    """What one log interval did, over all ranks.

    Attributes:
        iteration: its last iteration.
        iterations: how many it has.
        samples: sequences that were trained on.
        flops: operations of the model.
        seconds: time in training iterations.
    """

    iteration: int
    iterations: int
    samples: int
    flops: float
    seconds: float


class ProgressReport:
    """Counts what the iterations do on the host and says so after each log interval."""

    def __init__(self, args: Namespace) -> None:
        """Start with nothing counted; `args` are Megatron's validated arguments."""
        self._dtype: torch.dtype = args.params_dtype
        self._flops = ModelFlops(args)
        self._last_iteration: int | None = None
        self._seconds = 0.0
        self._iterations = self._samples = self._loss_rows = 0
        self._is_due = False

    @cached_property
    def _peak(self) -> float | None:
        # Asked for in the first interval, since a rank has chosen its device by then.
        device = megatron_compat.current_device()
        return peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else None, self._dtype)

    def count_loss_rows(self, rows: int) -> None:
        """Count rows with loss of one micro-batch of this rank."""
        self._loss_rows += rows

    def end_iteration(self, args: Namespace) -> None:
        """Count an iteration, at the end of its backward pass."""
        self._iterations += 1
        self._samples += megatron_reporting.global_batch_size()
        self._last_iteration = args.curr_iteration + 1
        self._is_due = self._last_iteration % args.log_interval == 0

    def say(self, args: Namespace, with_writers: bool = True) -> None:
        """Print and log the interval that has just ended, if one has; call it once Megatron has logged it.

        Args:
            args: Megatron's arguments.
            with_writers: to TensorBoard and Weights & Biases too; they are closed at the end of a run.
        """
        if not self._is_due:
            return
        assert self._last_iteration is not None
        self._is_due = False
        is_first_line = self._seconds == 0.0 and self._iterations == 1
        seconds = megatron_reporting.logged_training_seconds(is_first_line)
        # Rows with loss differ little between ranks: this one stands for all that compute a loss.
        rows = self._loss_rows * args.data_parallel_size * args.context_parallel_size
        flops = self._samples * self._flops.per_sequence()[0] + rows * self._flops.per_loss_row()
        interval = Interval(self._last_iteration, self._iterations, self._samples, flops, seconds - self._seconds)
        self._seconds = seconds
        self._iterations = self._samples = self._loss_rows = 0
        if interval.seconds <= 0.0:
            return
        if with_writers:
            for name, value in scalars(interval, args, self._peak).items():
                megatron_reporting.log_scalar(name, value, interval.iteration)
        megatron_reporting.print_on_last_rank(line(interval, args, self._peak))


def scalars(interval: Interval, args: Namespace, peak: float | None) -> dict[str, float]:
    """Return the numbers for TensorBoard and Weights & Biases.

    Args:
        interval: what was done.
        args: Megatron's arguments.
        peak: operations per second of one device, or None.
    """
    per_rank = interval.flops / interval.seconds / args.world_size
    values = {
        "clean-tokens-per-second": interval.samples * args.clean_seq_length / interval.seconds,
        "clean-tokens": float(args.consumed_train_samples * args.clean_seq_length),
        "tflops-per-rank": per_rank / 1e12,
        "eta-seconds": (args.train_iters - interval.iteration) * interval.seconds / interval.iterations,
    }
    return values if peak is None else values | {"mfu": per_rank / peak}


def line(interval: Interval, args: Namespace, peak: float | None) -> str:
    """Return the line of progress; arguments as for `scalars`."""
    values = scalars(interval, args, peak)
    minutes, seconds = divmod(round(values["eta-seconds"]), 60)
    mfu = f", MFU {values['mfu']:.1%}" if "mfu" in values else ""
    rate = values["clean-tokens-per-second"]
    return (
        f" [csbp] iteration {interval.iteration}/{args.train_iters} | "
        f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02} | clean tokens per second: {rate:.1f} | "
        f"per rank: {rate / args.world_size:.1f} | clean tokens: {values['clean-tokens']:.0f} | "
        f"TFLOP/s per rank: {values['tflops-per-rank']:.3g}{mfu} |"
    )


def peak_flops(device_name: str | None, dtype: torch.dtype) -> float | None:
    """Return the dense peak of a known GPU in operations per second; None for others, and beside bf16 and fp16."""
    if device_name is None or dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((tera * 1e12 for name, tera in PEAK_TFLOPS.items() if name in device_name), None)
