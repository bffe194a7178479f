# SPDX-License-Identifier: Apache-2.0
"""The picture of the demo: the three trainings on one axis of tokens, and the parity of the topologies."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from report import LOSS_TOLERANCE, Parity
from sizes import Size
from training import RunRecord

_COLOURS = {"autoregressive": "tab:gray", "converted": "tab:blue", "from scratch": "tab:orange"}


def draw(size: Size, runs: Mapping[str, RunRecord], parity: Mapping[str, Parity], entropy: float, path: Path) -> None:
    """Draw each training against the clean tokens that its weights have seen, and the differences of topologies.

    Args:
        size: of the demo.
        runs: "autoregressive", "converted" (which goes on where the first ends) and "from scratch".
        parity: by what was compared with CSBP.
        entropy: of the validation text's tokens without context, in nats.
        path: PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, errors) = pyplot.subplots(2, 1, figsize=(8, 8), height_ratios=(3, 1), layout="constrained")
    before = size.autoregressive.iterations * size.autoregressive.samples * size.sequence_length
    for name, run in runs.items():
        training = size.autoregressive if name == "autoregressive" else size.diffusion
        seen = before if name == "converted" else 0
        tokens = training.samples * size.sequence_length / 1e3
        iterations, evaluated = sorted(run.losses), sorted(run.validation)
        losses = smoothed([run.losses[i] for i in iterations])
        curves.plot([seen / 1e3 + i * tokens for i in iterations], losses, color=_COLOURS[name], alpha=0.5)
        kind = "next-token loss" if name == "autoregressive" else "NELBO"
        curves.plot(
            [seen / 1e3 + i * tokens for i in evaluated],
            [run.validation[i] for i in evaluated],
            "o-",
            color=_COLOURS[name],
            label=f"{name}: validation {kind}",
        )
    curves.axhline(entropy, color="black", linestyle="--", linewidth=1, label="entropy of single tokens (no context)")
    curves.set_xlabel("clean tokens seen, thousands")
    curves.set_ylabel("nats per token")
    curves.set_title("From an autoregressive model to block diffusion (faint: smoothed training loss)")
    curves.legend()
    curves.grid(alpha=0.3)
    # A difference of 0 has no place on a logarithmic axis.
    floor = 1e-8
    for name, numbers in parity.items():
        errors.semilogy(numbers.iterations, [max(error, floor) for error in numbers.relative_errors], "x-", label=name)
    errors.axhline(LOSS_TOLERANCE, color="black", linestyle="--", linewidth=1, label=f"tolerance {LOSS_TOLERANCE:g}")
    errors.set_ylim(floor / 2, 1e-5)
    errors.set_ylabel("relative difference\nof the loss to CSBP's")
    errors.set_xlabel("iteration of the conversion")
    errors.legend()
    errors.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def smoothed(values: Sequence[float], keep: float = 0.85) -> list[float]:
    """Return the exponential moving average, corrected for its start."""
    averages, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(total / weight)
    return averages
