# SPDX-License-Identifier: Apache-2.0
"""Rules on files and folders that flags name. Imports nothing of Megatron."""

from argparse import Namespace
from pathlib import Path

_FOLDERS = ("save", "load", "pretrained_checkpoint", "tensorboard_dir", "data_cache_path")


def check_folders(args: Namespace) -> None:
    """What has to be a folder is not a file: Megatron notices late, or takes it for an empty one."""
    for name in _FOLDERS:
        value = getattr(args, name)
        if value is not None and Path(value).is_file():
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is a file and has to be a folder; for example "
                f"--{name.replace('_', '-')} {Path(value).parent / name.replace('_dir', '')}."
            )


def check_ledger(args: Namespace) -> None:
    """The ledger's folder exists: it is opened before training, and nobody makes folders unasked."""
    if args.csbp_ledger is None:
        return
    path = Path(args.csbp_ledger)
    if path.is_dir():
        raise ValueError(
            f"--csbp-ledger {path} is a folder; name a file in it, for example --csbp-ledger {path / 'bytes.jsonl'}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"--csbp-ledger {path} names a folder that does not exist; make {path.parent}, or write into the working "
            f"directory with --csbp-ledger {path.name}."
        )


def check_tokenizer_folder(args: Namespace) -> None:
    """A Hugging Face tokenizer is named by its folder, not by the file in it."""
    path = Path(args.tokenizer_model or "")
    if args.tokenizer_type == "HuggingFaceTokenizer" and path.is_file():
        raise ValueError(
            f"--tokenizer-model {path} is a file, and a HuggingFaceTokenizer is loaded from a folder with "
            f"tokenizer.json and tokenizer_config.json; use --tokenizer-model {path.parent}."
        )
