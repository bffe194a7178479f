# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that a run saved, or an import wrote: its folder, its arguments, and the model that it came from."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_csbp import megatron_checkpoints
from megatron_csbp.weights.side_files import HUGGING_FACE
from megatron_csbp.weights.torch_dist_writer import TRACKER


@dataclass(frozen=True)
class TrainedCheckpoint:
    """One iteration of a checkpoint folder.

    Attributes:
        folder: what `--save` named.
        path: of the iteration.
        iteration: its number.
        arguments: of the run that saved it.
    """

    folder: Path
    path: Path
    iteration: int
    arguments: Namespace


def open_checkpoint(folder: Path, iteration: int | None) -> TrainedCheckpoint:
    """Find a checkpoint.

    Args:
        folder: what `--save` named.
        iteration: the latest one by default.

    Raises:
        ValueError: there is none, or it is not of the torch_dist format.
    """
    there = sorted(int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdigit())
    if iteration is None:
        tracker = folder / TRACKER
        text = tracker.read_text().strip() if tracker.is_file() else ""
        if not text.isdigit():
            raise ValueError(
                f"--load {folder} is no checkpoint folder: {TRACKER} is missing or names no iteration. Give the "
                "folder that a "
                "run has as its --save, not one iteration's."
            )
        iteration = int(text)
    if iteration not in there:
        raise ValueError(
            f"--load {folder} has no checkpoint of iteration {iteration}; it has "
            f"{', '.join(map(str, there)) or 'none'}. "
            "Choose one with --ckpt-step."
        )
    arguments = _arguments(folder / f"iter_{iteration:07d}")
    if arguments is None:
        raise ValueError(
            f"--load {folder}: iteration {iteration} is not in the torch_dist format, or does not say its "
            "arguments. Save with "
            "--ckpt-format torch_dist."
        )
    return TrainedCheckpoint(folder, folder / f"iter_{iteration:07d}", iteration, arguments)


def original_model(checkpoint: TrainedCheckpoint) -> Path | None:
    """Return the folder with config and tokenizer of the model that a run started from; None if it is not there.

    An imported checkpoint has it itself. A run's checkpoint says where its weights, or its tokenizer, came from.
    """
    named = (getattr(checkpoint.arguments, name, None) for name in ("pretrained_checkpoint", "load"))
    folders = [checkpoint.folder, *(Path(name) for name in named if name)]
    candidates = [folder / HUGGING_FACE for folder in folders]
    tokenizer = getattr(checkpoint.arguments, "tokenizer_model", None)
    if tokenizer:
        candidates.append(Path(tokenizer))
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def _arguments(path: Path) -> Namespace | None:
    """Return the arguments that a `torch_dist` checkpoint was saved with; None if there are none to read."""
    try:
        saved: Namespace | None = megatron_checkpoints.common_state(path).get("args")
    except (OSError, ValueError, EOFError):
        return None
    return saved
