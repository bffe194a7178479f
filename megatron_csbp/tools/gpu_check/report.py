# SPDX-License-Identifier: Apache-2.0
"""What the check found: as JSON and as a table."""

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from megatron_csbp.tools.gpu_check.accuracy import ALLOWED_RATIO, Accuracy
from megatron_csbp.tools.gpu_check.tile_table import TileTiming
from megatron_csbp.tools.gpu_check.timing import Timing
from megatron_csbp.tools.gpu_check.training_step import TrainingStep

_PACKAGES = (
    "megatron-csbp",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "flash-attn",
    "triton",
)


@dataclass
class Report:
    """Results in the order in which they came.

    Attributes:
        environment: versions and hardware.
        skipped: backends that are not installed, with the reason.
        accuracy: comparisons with fp64.
        timings: times and memory.
        tiles: times of single tiles, beside the model.
        training: the training step, if it ran.
        errors: one line for each failure.
        seconds: how long the check took.
    """

    environment: dict[str, str]
    skipped: dict[str, str] = field(default_factory=dict)
    accuracy: list[Accuracy] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    tiles: list[TileTiming] = field(default_factory=list)
    training: TrainingStep | None = None
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return what goes into the JSON file."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the table."""
        lines = ["", "megatron_csbp.tools.gpu_check"]
        lines += [f"  {name}: {value}" for name, value in self.environment.items()]
        lines += [f"  {name}: skipped ({reason})" for name, reason in self.skipped.items()]
        if self.accuracy:
            lines += ["", f"Error in units of that of a dense bf16 computation (at most {ALLOWED_RATIO:g})"]
            head: tuple[str, ...] = (
                "backend",
                "scheme",
                "P",
                "head groups",
                "clean attention",
                "worst part",
                "ratio",
                "max error",
                "",
            )
            lines += _table(head, [_accuracy_row(accuracy) for accuracy in self.accuracy])
        if self.timings:
            lines += ["", "Times of attention, one layer, without a network"]
            head = ("L", "P", "backend", "what", "forward ms", "backward ms", "TFLOP/s", "peak GiB")
            lines += _table(head, [_timing_row(timing) for timing in self.timings])
        if self.tiles:
            lines += ["", "Each tile of the last rank on its own, in us, beside the model of an H200 (docs/gpu.md)"]
            head = ("L", "backend", "tile", "G x T x U", "launches", "forward", "model", "backward", "model")
            lines += _table(head, [_tile_row(tile) for tile in self.tiles])
        if self.training is not None:
            lines += ["", f"Training step through Megatron: loss {self.training.loss}"]
        lines += ["", *(f"ERROR: {error}" for error in self.errors)]
        verdict = f"{len(self.errors)} error(s)" if self.errors else "no error"
        return [*lines, f"gpu_check: {verdict} in {self.seconds:.0f} s"]


def _accuracy_row(result: Accuracy) -> list[object]:
    return [
        result.backend,
        result.scheme,
        result.group_size,
        result.head_groups,
        result.clean_attention,
        result.worst_part,
        f"{result.ratio:.2f}",
        f"{result.error:.2e}",
        "ok" if result.passed else "WRONG",
    ]


def _timing_row(timing: Timing) -> list[object]:
    return [
        timing.length,
        timing.group_size,
        timing.backend,
        timing.what,
        f"{timing.forward_ms:.2f}",
        f"{timing.backward_ms:.2f}",
        f"{timing.tflops:.1f}",
        "-" if timing.peak_gib is None else f"{timing.peak_gib:.2f}",
    ]


def _tile_row(tile: TileTiming) -> list[object]:
    return [
        tile.length,
        tile.backend,
        tile.tile,
        tile.shape,
        tile.launches,
        f"{tile.forward_us:.0f}",
        f"{tile.modelled_forward_us:.0f}",
        f"{tile.backward_us:.0f}",
        f"{tile.modelled_backward_us:.0f}",
    ]


def environment(device: torch.device) -> dict[str, str]:
    """Return versions and hardware.

    Args:
        device: where the check runs.
    """
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["CUDA of torch"] = str(torch.version.cuda)
    if device.type == "cpu":
        return found | {"device": "CPU: the reduced form, which checks the script and no GPU kernel"}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "device": f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors",
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
