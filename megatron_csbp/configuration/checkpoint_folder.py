# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run will load, found as Megatron finds it, and whether its files can be read."""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_csbp import megatron_checkpoints

TRACKER = "latest_checkpointed_iteration.txt"
_CONFIG = "metadata.json"
_CONFIG_TEXT = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a run will load.

    Attributes:
        flag: the flag and its value that lead to it.
        path: the folder with its files.
        iteration: after which it was saved; 0 for a release.
        is_release: whether it is one without an iteration: weights for a new run.
    """

    flag: str
    path: Path
    iteration: int
    is_release: bool


def checkpoint_to_load(args: Namespace) -> Checkpoint | None:
    """Return what Megatron will load; None where it starts from random weights.

    `--pretrained-checkpoint` counts where `--load` has no checkpoint yet. Folders in object storage are not looked at.

    Raises:
        ValueError: a tracker file or a folder that it names cannot be used, or a flag names no checkpoint.
    """
    load, pretrained = args.load, args.pretrained_checkpoint
    if pretrained is not None and (load is None or not _has_tracker(load)):
        if "://" in pretrained:
            return None
        if not _has_tracker(pretrained):
            raise ValueError(
                f"--pretrained-checkpoint {pretrained} has no checkpoint: there is no {TRACKER} in it. Name the "
                "folder that an earlier run had as --save."
            )
        return _found("--pretrained-checkpoint", Path(pretrained), args.ckpt_step)
    if load is None or "://" in load:
        return None
    if not _has_tracker(load) and not args.ckpt_step:
        _check_first_start(args)
        return None
    return _found("--load", Path(load), args.ckpt_step)


def _has_tracker(folder: str) -> bool:
    return "://" in folder or (Path(folder) / TRACKER).is_file()


def _check_first_start(args: Namespace) -> None:
    """`--load` without a checkpoint is the first start of a run that saves there, and else a mistake."""
    folder = Path(args.load)
    if args.exit_on_missing_checkpoint:
        raise ValueError(f"--load {folder} has no checkpoint, and --exit-on-missing-checkpoint is given.")
    there = _iterations(folder)
    if there:
        raise ValueError(
            f"--load {folder} has iter_* folders ({', '.join(map(str, there))}) but no {TRACKER}, without which they "
            f"are not found: write {there[-1]} into that file, or give --ckpt-step {there[-1]}."
        )
    if args.save is None or Path(args.save).resolve() != folder.resolve():
        raise ValueError(
            f"--load {folder} has no checkpoint: there is no {TRACKER} in it. Name the folder of an earlier run, or, "
            f"to start anew and go on from there after an interruption, give --save {folder} as well; without --load "
            "a run starts from random weights."
        )


def _iterations(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdigit())


def _found(flag: str, folder: Path, step: int | None) -> Checkpoint:
    iteration, is_release = read_tracker(folder) if (folder / TRACKER).is_file() else (0, False)
    if step and not is_release:
        iteration = step
    path = folder / ("release" if is_release else f"iter_{iteration:07d}")
    if not path.is_dir():
        source = "--ckpt-step asks for it" if step and not is_release else f"{TRACKER} names it"
        what = "release" if is_release else f"of iteration {iteration}"
        raise ValueError(
            f"{flag} {folder} has no checkpoint {what} ({source}); it has "
            f"{', '.join(map(str, _iterations(folder))) or 'none'}. Choose one with --ckpt-step, or leave out {flag}."
        )
    return Checkpoint(f"{flag} {folder}", path, iteration, is_release)


def read_tracker(folder: Path) -> tuple[int, bool]:
    """Return the iteration that Megatron's tracker file names, and whether it names a release instead.

    Raises:
        ValueError: it holds neither; Megatron would end without training, with status 0.
    """
    tracker = folder / TRACKER
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return 0, True
    if text.isascii() and text.isdigit():
        return int(text), False
    there = _iterations(folder)
    remedy = f"write {there[-1]} into it" if there else "remove it to start anew"
    raise ValueError(
        f"{tracker} holds {text[:40]!r} and has to hold the iteration of a checkpoint, or release; the folder has "
        f"iterations {', '.join(map(str, there)) or 'none'}: {remedy}."
    )


def check_format(checkpoint: Checkpoint) -> None:
    """Check that Megatron will recognise the files: by `metadata.json`, or as ranks of the legacy format.

    Raises:
        ValueError: it will not.
    """
    config, path = checkpoint.path / _CONFIG, checkpoint.path
    if not config.is_file():
        if any(path.glob("mp_rank_0*")):
            return
        if (path / ".metadata").is_file():
            raise ValueError(
                f"{checkpoint.flag}: {config} is missing, without which {path} is not taken for a checkpoint. Write "
                f"{_CONFIG_TEXT} into it."
            )
        raise ValueError(
            f"{checkpoint.flag}: {path} has neither {_CONFIG} nor mp_rank_00: it is no checkpoint of Megatron. "
            f"{_another(checkpoint)}"
        )
    try:
        known = "sharded_backend" in json.loads(config.read_text())
    except (ValueError, TypeError, OSError):
        known = False
    if not known:
        raise ValueError(
            f"{checkpoint.flag}: {config} is empty or cut off ({config.stat().st_size} bytes). Write {_CONFIG_TEXT} "
            "into it."
        )


def check_sizes(checkpoint: Checkpoint) -> None:
    """Check that the data files are there and as long as the checkpoint's own index says.

    Reads the index and looks at sizes only. One rank is enough.

    Raises:
        ValueError: the index cannot be read, or a file is missing or too short.
    """
    if not (checkpoint.path / _CONFIG).is_file():
        return  # the legacy format has no index
    for name, least_bytes in readable(checkpoint, megatron_checkpoints.least_file_bytes).items():
        file = checkpoint.path / name
        if not file.is_file():
            raise ValueError(f"{checkpoint.flag}: {file} is missing. {_another(checkpoint)}")
        if file.stat().st_size < least_bytes:
            raise ValueError(
                f"{checkpoint.flag}: {file} is truncated: it has {file.stat().st_size} bytes, and the checkpoint's "
                f"index names {least_bytes}. {_another(checkpoint)}"
            )


def readable[T](checkpoint: Checkpoint, read: Callable[[Path], T]) -> T:
    """Return what a function reads of a checkpoint.

    Raises:
        ValueError: it cannot read it, whatever the reason.
    """
    try:
        return read(checkpoint.path)
    except Exception as error:
        raise ValueError(
            f"{checkpoint.flag}: {checkpoint.path} cannot be read ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). {_another(checkpoint)}"
        ) from error


def _another(checkpoint: Checkpoint) -> str:
    others = [step for step in _iterations(checkpoint.path.parent) if step != checkpoint.iteration]
    if not others:
        return "Copy it again from where it was saved."
    return f"Copy it again, or load another with --ckpt-step {others[-1]}."
