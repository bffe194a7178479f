# SPDX-License-Identifier: Apache-2.0
"""Every topology trains like one rank: twenty iterations in fp32 from the same weights, and the first gradients.

The weights are in one `torch_dist` checkpoint that one rank has written, since Megatron's own initialisation depends
on tensor and pipeline parallelism. Single precision leaves differences near 2e-7.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.functional.model_flags import (
    BLOCK_DIFFUSION,
    CSBP2,
    CSBP4,
    DEEP,
    HYBRID,
    MOE,
    NEMOTRON,
    PP2,
    TIED,
    TP2,
    UNTIED_MQA,
    iterations,
    words,
)
from tests.support.checkpoint_tensors import Tensors, load_parameters, relative_errors
from tests.support.megatron_run import Finished, Ranks, worst_difference

CURVE_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
ITERATIONS = 20
STEP = 1e6
"""Learning rate of the run that shows gradients: what a parameter loses, over STEP, is its gradient. It is so large
that rounding the parameter does not matter."""

ONE_STEP_OF_SGD = words(
    f"--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr {STEP} --min-lr {STEP} "
    "--lr-decay-style constant --lr-warmup-iters 0"
)
MODELS = {
    "nemotron": [*TIED, *NEMOTRON],
    "block-diffusion": [*UNTIED_MQA, *BLOCK_DIFFUSION],
    "deep": [*DEEP, *BLOCK_DIFFUSION, "--clean-attention", "token-causal"],
    "moe": [*MOE, *NEMOTRON],
    "windows": [*DEEP, *NEMOTRON, *words("--window-size 14,0 --window-attn-skip-freq 4")],
    "two views": [*TIED, *NEMOTRON, "--corrupted-views", "2"],
    "documents": [*DEEP, *BLOCK_DIFFUSION, *words("--window-size 14,0 --window-attn-skip-freq 4")],
    "hybrid": [*HYBRID, *NEMOTRON],
    "hybrid documents": [*HYBRID, *BLOCK_DIFFUSION, *words("--window-size 14,0 --corrupted-views 2")],
}
"""The windows of 15 positions are no multiple of a block; every fourth layer has none."""
_DOCUMENTS = ["tests.functional.hooks:samples_of_documents_with_few_active_blocks"]
HOOKS = {"documents": _DOCUMENTS, "hybrid documents": _DOCUMENTS}


@dataclass(frozen=True)
class Topology:
    """How many ranks and which flags; to be compared with one rank of the same model."""

    model: str
    world_size: int
    flags: list[str]


BP2 = ["--bp-size", "2"]
CP2 = ["--context-parallel-size", "2", "--context-scheme", "cp"]
SP = "--sequence-parallel"
INTERLEAVED = [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]
FULL_RECOMPUTE = words("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
TOPOLOGIES = {
    "csbp2": Topology("nemotron", 2, CSBP2),
    "csbp2, multi-query attention": Topology("block-diffusion", 2, CSBP2),
    "csbp4": Topology("nemotron", 4, CSBP4),
    "pure bp2": Topology("nemotron", 2, BP2),
    "pure bp2, multi-query attention": Topology("block-diffusion", 2, BP2),
    "cp2": Topology("nemotron", 2, CP2),
    "dp2": Topology("block-diffusion", 2, []),
    "dp2 x csbp2": Topology("nemotron", 4, CSBP2),
    "tp2 x csbp2": Topology("block-diffusion", 4, [*TP2, *CSBP2]),
    "tp2 x csbp2, sequence parallel": Topology("nemotron", 4, [*TP2, SP, *CSBP2]),
    "tp2 x csbp2, sequence parallel, fewer kv heads than tp": Topology("block-diffusion", 4, [*TP2, SP, *CSBP2]),
    "tp2 x pure bp2, sequence parallel": Topology("nemotron", 4, [*TP2, SP, *BP2]),
    "pp2 x csbp2, a stage without layers": Topology(
        "nemotron", 4, [*CSBP2, *PP2, *words("--pipeline-model-parallel-layout Ett|L")]
    ),
    "pp2 x csbp2": Topology("nemotron", 4, [*PP2, *CSBP2]),
    "pp2 x pure bp2": Topology("block-diffusion", 4, [*PP2, *BP2]),
    "interleaved pp2 x csbp2": Topology("deep", 4, [*INTERLEAVED, *CSBP2]),
    "ep2 x csbp2": Topology("moe", 4, [*CSBP2, "--expert-model-parallel-size", "2"]),
    "one micro-batch": Topology("block-diffusion", 1, ["--micro-batch-size", "4"]),
    "csbp2, four micro-batches": Topology("block-diffusion", 2, [*CSBP2, "--micro-batch-size", "1"]),
    "csbp2, head groups, recomputed, loss in chunks": Topology(
        "nemotron",
        2,
        [
            *CSBP2,
            *words("--csbp-head-groups 2 --csbp-loss-chunk-rows 7 --csbp-grad-reduce-dtype fp32"),
            *FULL_RECOMPUTE,
        ],
    ),
    "tp2 x cp2, sequence parallel, loss in chunks": Topology(
        "block-diffusion", 4, [*TP2, SP, *CP2, "--csbp-loss-chunk-rows", "9"]
    ),
    "csbp2, contiguous": Topology("block-diffusion", 2, [*CSBP2, "--block-assignment", "contiguous"]),
    "csbp2, selective recompute": Topology("block-diffusion", 2, [*CSBP2, "--recompute-granularity", "selective"]),
    "csbp2, full recompute": Topology("nemotron", 2, [*CSBP2, *FULL_RECOMPUTE]),
    "csbp4, windows, head groups": Topology("windows", 4, [*CSBP4, "--csbp-head-groups", "2"]),
    "cp2, windows, full recompute": Topology("windows", 2, [*CP2, *FULL_RECOMPUTE]),
    "csbp2, two views": Topology("two views", 2, CSBP2),
    "tp2 x pure bp2, sequence parallel, two views": Topology("two views", 4, [*TP2, SP, *BP2]),
    "cp2, two views": Topology("two views", 2, CP2),
    "csbp2, documents": Topology("documents", 2, CSBP2),
    "pure bp2, documents": Topology("documents", 2, BP2),
    "pp2 x csbp2, documents, full recompute": Topology("documents", 4, [*PP2, *CSBP2, *FULL_RECOMPUTE]),
    "interleaved pp2, documents": Topology("documents", 2, INTERLEAVED),
    "tp2 x csbp2, sequence parallel, documents": Topology("documents", 4, [*TP2, SP, *CSBP2]),
    "gated delta nets, csbp4": Topology("hybrid", 4, CSBP4),
    "gated delta nets, cp2": Topology("hybrid", 2, CP2),
    "gated delta nets, tp2": Topology("hybrid", 2, TP2),
    "gated delta nets, tp2 x csbp2, sequence parallel": Topology("hybrid", 4, [*TP2, SP, *CSBP2]),
    "gated delta nets, pp2 x csbp2, contiguous, full recompute": Topology(
        "hybrid", 4, [*PP2, *CSBP2, *words("--block-assignment contiguous"), *FULL_RECOMPUTE]
    ),
    "gated delta nets, csbp2, documents": Topology("hybrid documents", 2, CSBP2),
    "gated delta nets, pp2 x pure bp2, documents": Topology("hybrid documents", 4, [*PP2, *BP2]),
}
SEEN_EVERY_TIME = {
    "csbp2",
    "csbp4",
    "pure bp2",
    "cp2",
    "tp2 x csbp2, sequence parallel, fewer kv heads than tp",
    "pp2 x csbp2, a stage without layers",
    "interleaved pp2 x csbp2",
    "ep2 x csbp2",
    "csbp2, head groups, recomputed, loss in chunks",
    "csbp4, windows, head groups",
    "csbp2, two views",
    "pp2 x csbp2, documents, full recompute",
    "gated delta nets, csbp4",
    "gated delta nets, csbp2, documents",
}
"""One case of each kind; `make test-all` runs the others too."""


@dataclass(frozen=True)
class Start:
    """Where every run of a model starts, and what one rank makes of it."""

    checkpoint: Path
    parameters: Tensors
    training: Finished
    gradients: Tensors


def load(checkpoint: Path) -> list[str]:
    return ["--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]


def train(ranks: Ranks, flags: list[str], world_size: int = 1, hooks: Sequence[str] = ()) -> Finished:
    return ranks.train([*flags, *iterations(ITERATIONS, evaluate=True)], world_size, hooks=hooks).check()


def gradients(
    ranks: Ranks, flags: list[str], before: Tensors, folder: Path, world_size: int = 1, hooks: Sequence[str] = ()
) -> Tensors:
    """Return the gradients of one step: the way that one step of plain gradient descent goes."""
    save = ["--save", str(folder), "--no-save-optim", "--no-save-rng"]
    ranks.train([*flags, *iterations(1), *ONE_STEP_OF_SGD, *save], world_size, hooks=hooks).check()
    after = load_parameters(folder, 1)
    return {name: (tensor.double() - after[name].double()) / STEP for name, tensor in before.items()}


@pytest.fixture(scope="module")
def start_of(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Start]:
    """Train each model on one rank, once."""
    known: dict[str, Start] = {}

    def start(model: str) -> Start:
        if model not in known:
            folder, flags, hooks = tmp_path_factory.mktemp("start"), MODELS[model], HOOKS.get(model, [])
            ranks.train([*flags, *iterations(1), "--save", str(folder / "checkpoint")], hooks=hooks).check()
            flags = [*flags, *load(folder / "checkpoint")]
            before = load_parameters(folder / "checkpoint", 1)
            known[model] = Start(
                folder / "checkpoint",
                before,
                train(ranks, flags, hooks=hooks),
                gradients(ranks, flags, before, folder / "gradients", hooks=hooks),
            )
        return known[model]

    return start


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SEEN_EVERY_TIME else pytest.mark.slow) for name in TOPOLOGIES]
)
def test_trains_like_one_rank(name: str, ranks: Ranks, start_of: Callable[[str], Start], tmp_path: Path) -> None:
    topology = TOPOLOGIES[name]
    start = start_of(topology.model)
    flags = [*MODELS[topology.model], *topology.flags, *load(start.checkpoint)]
    hooks = HOOKS.get(topology.model, [])
    run = train(ranks, flags, topology.world_size, hooks)
    assert len(run.losses()) == ITERATIONS
    assert worst_difference(run.losses(), start.training.losses()) < CURVE_TOLERANCE
    assert worst_difference(run.grad_norms, start.training.grad_norms) < CURVE_TOLERANCE
    assert worst_difference(run.evaluated("nelbo"), start.training.evaluated("nelbo")) < CURVE_TOLERANCE
    found = gradients(ranks, flags, start.parameters, tmp_path, topology.world_size, hooks)
    errors = relative_errors(found, start.gradients)
    assert {name: error for name, error in errors.items() if not error < GRADIENT_TOLERANCE} == {}


@pytest.mark.parametrize("model", ["nemotron", "moe"])
def test_one_rank_learns(model: str, start_of: Callable[[str], Start]) -> None:
    """What the others are compared with is training: its next-token loss, the least noisy of its losses, falls."""
    losses = start_of(model).training.losses("ar loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_has_a_gradient(model: str, start_of: Callable[[str], Start]) -> None:
    gradients = start_of(model).gradients
    assert len(gradients) >= 8
    assert {name for name, tensor in gradients.items() if not tensor.norm().item() > 0} == set()


@pytest.mark.parametrize("topology", [CSBP2, CP2, BP2], ids=["csbp2", "cp2", "pure bp2"])
def test_fresh_runs_start_from_the_same_weights_on_any_context_group(topology: list[str], ranks: Ranks) -> None:
    """Position embeddings and routers are drawn outside of Megatron's tracker of random states."""
    model = [*MOE, *NEMOTRON, *words("--position-embedding-type learned_absolute")]
    model += words("--moe-aux-loss-coeff 0 --moe-z-loss-coeff 0")  # which pure BP refuses
    alone, grouped = (
        ranks.train([*model, *flags, *iterations(2)], n).check() for flags, n in (([], 1), (topology, 2))
    )
    assert worst_difference(grouped.losses(), alone.losses()) < CURVE_TOLERANCE
    assert worst_difference(grouped.grad_norms, alone.grad_norms) < CURVE_TOLERANCE
