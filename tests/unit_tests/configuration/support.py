# SPDX-License-Identifier: Apache-2.0
"""Runs and checkpoints for the tests of the rules on checkpoints."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_csbp import megatron_checkpoints
from megatron_csbp.configuration.checkpoint_folder import TRACKER
from megatron_csbp.configuration.flag_names import FlagNames
from tests.support.megatron_arguments import VALID, parse, parser

NETWORK = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --swiglu --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --normalization RMSNorm --disable-bias-linear --max-position-embeddings 64"
)
TRAINING = "--lr 1e-3 --min-lr 0 --train-iters 20 --global-batch-size 2 --micro-batch-size 1 --seed 7"
RUN = f"{VALID} {NETWORK} {TRAINING}"
FLAGS = FlagNames(parser())

type Save = Callable[..., Path]


def arguments(flags: str = "", **changes: Any) -> Namespace:
    """Return arguments as they are after Megatron's validation, as far as the rules read them."""
    args, _ = parse(f"{RUN} {flags}")
    args.rank = 0
    args.params_dtype = torch.float32
    args.clean_seq_length, args.corrupted_views = args.seq_length, 1
    args.padded_vocab_size = 192
    args.start_weight_decay = args.end_weight_decay = args.weight_decay
    return Namespace(**vars(args) | changes)


def lay_out(folder: Path, iteration: int = 10) -> Path:
    """Make what a folder with a checkpoint has, without its contents."""
    (folder / TRACKER).write_text(str(iteration))
    path = folder / f"iter_{iteration:07d}"
    path.mkdir()
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return path


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """A function that makes a checkpoint of iteration 10 with these arguments, in a folder that it returns."""

    def write(args: Namespace | None, **state: Any) -> Path:
        path = lay_out(tmp_path)

        def read(asked: Path) -> dict[str, Any]:
            assert asked == path
            return {"args": args, "iteration": 10} | state

        monkeypatch.setattr(megatron_checkpoints, "common_state", read)
        monkeypatch.setattr(megatron_checkpoints, "least_file_bytes", lambda _: {})
        return tmp_path

    return write
