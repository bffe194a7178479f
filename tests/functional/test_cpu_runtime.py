# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron, by a script that knows nothing of this package, on the CPU runtime: every topology trains alike."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional.model_flags import DEEP, MOE, PP2, TP2, iterations, words
from tests.support.megatron_run import Finished, Ranks, worst_difference

SCRIPT = str(Path(__file__).with_name("stock_shape_pretrain_gpt.py"))
LOCAL = words(
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion --calculate-per-token-loss --hidden-dropout 0 --attention-dropout 0"
)
SEQUENCE_PARALLEL = words("--sequence-parallel --spec tests.support.local_block_spec block_spec")
FULL_RECOMPUTE = words("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
SHARDED_OPTIMIZER = words("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
DROPOUT = words("--hidden-dropout 0.1 --attention-dropout 0.1")
TOLERANCE = 2e-6

Train = Callable[..., Finished]


@pytest.fixture(scope="module")
def train(ranks: Ranks) -> Train:
    """Train four iterations of a model with the stock script."""

    def run(model: list[str], *flags: str, world_size: int = 1) -> Finished:
        return ranks.train([SCRIPT, *model, *LOCAL, *iterations(4), *flags], world_size, entry="plain").check()

    return run


@pytest.fixture(scope="module")
def saved(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[str], Finished]]:
    """Flags that load a model's weights from before its second iteration, and the run that goes on from there."""
    known: dict[str, tuple[list[str], Finished]] = {}

    def save(name: str) -> tuple[list[str], Finished]:
        if name not in known:
            folder, model = str(tmp_path_factory.mktemp("saved")), MODELS[name]
            train(model, "--exit-interval", "1", "--save", folder)
            load = ["--load", folder, "--finetune"]
            known[name] = load, train(model, *load)
        return known[name]

    return save


MODELS = {"dense": DEEP, "experts": MOE}


@pytest.mark.parametrize(
    "model, flags, world_size",
    [
        pytest.param("dense", [], 2, id="dp2", marks=pytest.mark.slow),
        pytest.param("dense", ["--num-workers", "2"], 2, id="data workers", marks=pytest.mark.slow),
        pytest.param("dense", ["--micro-batch-size", "4"], 1, id="one micro-batch", marks=pytest.mark.slow),
        pytest.param("dense", SHARDED_OPTIMIZER, 2, id="dp2, sharded optimizer, overlap", marks=pytest.mark.slow),
        pytest.param("dense", TP2, 2, id="tp2", marks=pytest.mark.slow),
        pytest.param("dense", [*TP2, *SEQUENCE_PARALLEL], 2, id="tp2, sequence parallel", marks=pytest.mark.slow),
        pytest.param("dense", [*TP2, *SEQUENCE_PARALLEL, *FULL_RECOMPUTE], 2, id="tp2, sequence parallel, recompute"),
        pytest.param("dense", PP2, 2, id="pp2", marks=pytest.mark.slow),
        pytest.param("dense", [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"], 2, id="interleaved pp2"),
        pytest.param(
            "dense", words("--recompute-granularity selective"), 1, id="selective recompute", marks=pytest.mark.slow
        ),
        pytest.param("experts", words("--expert-model-parallel-size 2"), 2, id="ep2", marks=pytest.mark.slow),
        pytest.param(
            "experts", [*words("--expert-model-parallel-size 2"), *SHARDED_OPTIMIZER], 2, id="ep2, sharded optimizer"
        ),
    ],
)
def test_a_topology_trains_like_one_rank(
    model: str, flags: list[str], world_size: int, train: Train, saved: Callable[[str], tuple[list[str], Finished]]
) -> None:
    load, expected = saved(model)
    run = train(MODELS[model], *load, *flags, world_size=world_size)
    assert len(run.losses()) == 4
    assert worst_difference(run.losses(), expected.losses()) < TOLERANCE
    assert worst_difference(run.grad_norms, expected.grad_norms) < TOLERANCE


def test_losses_fall(saved: Callable[[str], tuple[list[str], Finished]]) -> None:
    """So that the runs above agree about something."""
    for model in MODELS:
        losses = saved(model)[1].losses()
        assert losses[-1] < losses[0] - 0.01, model


def test_recompute_repeats_the_random_numbers(train: Train) -> None:
    whole = train(DEEP, *DROPOUT)
    assert train(DEEP, *DROPOUT, *FULL_RECOMPUTE).records == whole.records
    assert train(DEEP, *DROPOUT, "--num-workers", "2").records == whole.records


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*TP2, *DROPOUT], id="tp2, dropout", marks=pytest.mark.slow),
        pytest.param(SHARDED_OPTIMIZER, id="sharded optimizer, fp32", marks=pytest.mark.slow),
        pytest.param(
            [*SHARDED_OPTIMIZER, *words("--bf16 --dist-ckpt-optim-fully-reshardable --ckpt-fully-parallel-save")],
            id="sharded optimizer, bf16, reshardable",
        ),
    ],
)
def test_resumes_bit_for_bit(flags: list[str], train: Train, tmp_path: Path) -> None:
    whole = train(DEEP, *flags, world_size=2)
    train(DEEP, *flags, "--exit-interval", "2", "--save", str(tmp_path), world_size=2)
    resumed = train(DEEP, *flags, "--load", str(tmp_path), world_size=2)
    assert [record["iteration"] for record in resumed.records] == [3, 4]
    assert resumed.records == whole.records[2:]


def test_gloo_does_what_megatron_asks_of_nccl(ranks: Ranks) -> None:
    ranks.call("tests.support.gloo_stand_ins:check_all", None, world_size=2).check()
