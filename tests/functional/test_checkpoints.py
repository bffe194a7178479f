# SPDX-License-Identifier: Apache-2.0
"""Ten iterations, a checkpoint and ten more are twenty iterations, in the same topology and in others."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.functional.model_flags import (
    CSBP2,
    CSBP4,
    HYBRID,
    NEMOTRON,
    PP2,
    TIED,
    TP2,
    UNTIED_MQA,
    iterations,
    words,
)
from tests.support.checkpoint_tensors import Tensors, load_parameters, load_tensors
from tests.support.megatron_run import Finished, Ranks, worst_difference

TOLERANCE = 2e-6
BF16_TOLERANCE = 1e-2

FP32 = [*TIED, *NEMOTRON]
SHARDED = [*FP32, *words("--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-fully-parallel-save")]
BF16 = [
    *UNTIED_MQA,
    *NEMOTRON,
    *words("--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    *words("--dist-ckpt-optim-fully-reshardable"),
]
HYBRID_SHARDED = [*HYBRID, *NEMOTRON, *words("--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable")]
KINDS = {
    "fp32": FP32,
    "fp32, sharded optimizer": SHARDED,
    "bf16, sharded optimizer, overlap": BF16,
    "gated delta nets, sharded optimizer": HYBRID_SHARDED,
}


@dataclass(frozen=True)
class Interrupted:
    """A run on CSBP 2, uninterrupted, and the checkpoint of the same run that stopped after ten iterations."""

    whole: Finished
    last_tensors: Tensors
    checkpoint: Path


@pytest.fixture(scope="module")
def interrupted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Interrupted]:
    """Train each kind once."""
    known: dict[str, Interrupted] = {}

    def train(kind: str) -> Interrupted:
        if kind not in known:
            flags, folder = [*KINDS[kind], *CSBP2, *iterations(20)], tmp_path_factory.mktemp("interrupted")
            whole = ranks.train([*flags, "--save", str(folder / "whole")], 2).check()
            stop = ["--exit-interval", "10", "--save", str(folder / "stopped")]
            stopped = ranks.train([*flags, *stop], 2).check()
            assert stopped.losses() == whole.losses()[:10]
            known[kind] = Interrupted(whole, load_tensors(folder / "whole", 20), folder / "stopped")
        return known[kind]

    return train


def resume(ranks: Ranks, checkpoint: Path, flags: list[str], world_size: int, *more: str) -> Finished:
    run = ranks.train([*flags, *iterations(20), "--load", str(checkpoint), *more], world_size).check()
    assert [record["iteration"] for record in run.records if record["kind"] == "train"] == list(range(11, 21))
    return run


@pytest.mark.parametrize("kind", [pytest.param("fp32", marks=pytest.mark.slow), "bf16, sharded optimizer, overlap"])
def test_resumes_bit_for_bit(
    kind: str, ranks: Ranks, interrupted: Callable[[str], Interrupted], tmp_path: Path
) -> None:
    before = interrupted(kind)
    run = resume(ranks, before.checkpoint, [*KINDS[kind], *CSBP2], 2, "--save", str(tmp_path))
    assert run.losses() == before.whole.losses()[10:]
    assert run.grad_norms == before.whole.grad_norms[10:]
    tensors = load_tensors(tmp_path, 20)
    assert tensors.keys() == before.last_tensors.keys()
    assert [name for name, tensor in tensors.items() if not tensor.equal(before.last_tensors[name])] == []


@pytest.mark.parametrize(
    "kind, topology, world_size",
    [
        pytest.param("fp32", [], 1, id="one rank", marks=pytest.mark.slow),
        pytest.param("fp32", CSBP4, 4, id="csbp4", marks=pytest.mark.slow),
        pytest.param("fp32", CSBP2, 4, id="dp2 x csbp2", marks=pytest.mark.slow),
        pytest.param("fp32", [*TP2, *CSBP2], 4, id="tp2 x csbp2"),
        pytest.param("fp32", [*PP2, "--bp-size", "2"], 4, id="pp2 x pure bp2", marks=pytest.mark.slow),
        pytest.param("fp32, sharded optimizer", [], 1, id="one rank, sharded optimizer"),
        pytest.param("fp32, sharded optimizer", TP2, 2, id="tp2, sharded optimizer", marks=pytest.mark.slow),
        pytest.param("fp32, sharded optimizer", CSBP2, 4, id="dp2 x csbp2, sharded optimizer"),
        *(
            pytest.param(
                "gated delta nets, sharded optimizer",
                topology,
                4,
                id=f"gated delta nets, {name}",
                marks=pytest.mark.slow,
            )
            for name, topology in (("tp2 x csbp2", [*TP2, *CSBP2]), ("pp2 x csbp2", [*PP2, *CSBP2]))
        ),
    ],
)
def test_resumes_in_another_topology(
    kind: str, topology: list[str], world_size: int, ranks: Ranks, interrupted: Callable[[str], Interrupted]
) -> None:
    before = interrupted(kind)
    run = resume(ranks, before.checkpoint, [*KINDS[kind], *topology], world_size)
    assert worst_difference(run.losses(), before.whole.losses()[10:]) < TOLERANCE
    assert worst_difference(run.grad_norms, before.whole.grad_norms[10:]) < TOLERANCE


def test_the_sharded_optimizer_trains_like_the_whole_one(interrupted: Callable[[str], Interrupted]) -> None:
    sharded, whole = interrupted("fp32, sharded optimizer").whole, interrupted("fp32").whole
    assert worst_difference(sharded.losses(), whole.losses()) < TOLERANCE
    assert worst_difference(sharded.grad_norms, whole.grad_norms) < TOLERANCE


def test_bf16_learns(interrupted: Callable[[str], Interrupted]) -> None:
    """The next-token loss, the least noisy one, falls."""
    losses = interrupted("bf16, sharded optimizer, overlap").whole.losses("ar loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_bf16_resumes_in_another_topology(ranks: Ranks, interrupted: Callable[[str], Interrupted]) -> None:
    before = interrupted("bf16, sharded optimizer, overlap")
    run = resume(ranks, before.checkpoint, [*BF16, *CSBP2], 4)
    assert worst_difference(run.losses(), before.whole.losses()[10:]) < BF16_TOLERANCE


def test_checkpoint_arguments_stand_for_the_flags_of_the_model(
    ranks: Ranks, interrupted: Callable[[str], Interrupted]
) -> None:
    """`--use-checkpoint-args` brings the sizes back, and `--seq-length` as the user gave it, not the row count."""
    before = interrupted("fp32")
    flags = list(FP32)
    for flag in ("--seq-length", "--hidden-size", "--num-layers", "--num-attention-heads", "--ffn-hidden-size"):
        del flags[flags.index(flag) : flags.index(flag) + 2]
    run = resume(ranks, before.checkpoint, [*flags, *CSBP2], 2, "--use-checkpoint-args")
    assert run.losses() == before.whole.losses()[10:]


def test_weights_pass_between_autoregressive_and_block_diffusion_runs(ranks: Ranks, tmp_path: Path) -> None:
    """Both write the same keys. At a learning rate of 0 each run hands on exactly the weights that it has loaded."""
    still = [*iterations(1), *words("--lr 0 --min-lr 0"), "--finetune"]
    keep = words("--init-mask-token keep")
    runs = {
        "autoregressive": (iterations(2), 1),
        "block diffusion": ([*still, *keep, *NEMOTRON, *CSBP2, "--load", str(tmp_path / "autoregressive")], 2),
        "autoregressive again": ([*still, "--load", str(tmp_path / "block diffusion")], 1),
    }
    for name, (flags, world_size) in runs.items():
        ranks.train([*TIED, *flags, "--save", str(tmp_path / name)], world_size).check()
    first = load_parameters(tmp_path / "autoregressive", 2)
    for name in ("block diffusion", "autoregressive again"):
        handed_on = load_parameters(tmp_path / name, 1)
        assert handed_on.keys() == first.keys()
        assert [key for key, tensor in handed_on.items() if not tensor.equal(first[key])] == []


def test_a_model_without_grouped_heads_resumes_with_its_own_flags(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron saves another number of query groups than the flags say."""
    flags = [word for word in FP32 if word != "--group-query-attention"]
    del flags[flags.index("--num-query-groups") : flags.index("--num-query-groups") + 2]
    flags += [*CSBP2, *iterations(4)]
    whole = ranks.train([*flags, "--save", str(tmp_path), "--save-interval", "2"], 2).check()
    again = ranks.train([*flags, "--load", str(tmp_path), "--ckpt-step", "2"], 2).check()
    assert again.grad_norms == whole.grad_norms[2:]
