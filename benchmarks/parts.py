# SPDX-License-Identifier: Apache-2.0
"""The parts of the suite: what each measures in the whole run and in the reduced one."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import answers_only, attention_path, conversion, fixed_time, on_paper
from benchmarks.links import (
    ACROSS_NODES,
    H200_ATTENTION_FLOPS,
    H200_ITEMSIZE,
    NVLINK,
    UNLIMITED,
    Link,
)
from benchmarks.network import Network
from benchmarks.ranks import RankWorld, is_oversubscribed, run_on_ranks
from benchmarks.stack import BP, CP, CP_AT_ONCE, CSBP, CSBP_AT_ONCE, CSBP_CONTIGUOUS, HEAD_GROUPS, Shape, Variant
from benchmarks.throughput import Comparison, calibrate, compare, summarise
from benchmarks.wire import TOLERANCE, measure_wire

SCHEMES = (CP, BP, CSBP)


@dataclass(frozen=True)
class Part:
    """One part of the suite.

    Attributes:
        title: heading in the report.
        measure: takes whether the reduced run is wanted; returns what goes into the JSON file.
        needs_network: whether it needs network namespaces.
    """

    title: str
    measure: Callable[[bool], dict[str, Any]]
    needs_network: bool = False


@dataclass(frozen=True)
class Sweep:
    """Lengths over one link.

    Attributes:
        title: names the sweep in the report.
        link: the link that is imitated.
        size: P, ranks.
        lengths: L of each comparison.
        variants: what is compared.
    """

    title: str
    link: Link
    size: int
    lengths: tuple[int, ...]
    variants: tuple[Variant, ...] = SCHEMES

    @staticmethod
    def repeats(length: int) -> int:
        """Return how many steps of each variant are timed: short ones are noisier and cheaper."""
        return 5 if length <= 2048 else 3


ABLATIONS = (CP, CP_AT_ONCE, CSBP, CSBP_AT_ONCE, CSBP_CONTIGUOUS)
SWEEPS = (
    Sweep("Across nodes", ACROSS_NODES, 2, (1024, 2048, 4096, 8192)),
    Sweep("Across nodes", ACROSS_NODES, 4, (1024, 2048, 4096, 8192)),
    Sweep("NVLink", NVLINK, 2, (1024, 2048, 4096, 8192)),
    Sweep("Unlimited", UNLIMITED, 2, (1024, 4096)),
    Sweep("Ablations, across nodes", ACROSS_NODES, 2, (4096,), ABLATIONS),
)
QUICK_SWEEPS = (
    Sweep("Across nodes", ACROSS_NODES, 2, (256, 512)),
    Sweep("Ablations, across nodes", ACROSS_NODES, 2, (256,), ABLATIONS),
)


def wire(quick: bool) -> dict[str, Any]:
    """Count bytes on the interfaces of two and four ranks.

    Raises:
        RuntimeError: wire, ledger and formula of an exchange disagree.
    """
    length = 1024 if quick else 4096
    rows = measure_wire(length, (2,) if quick else (2, 4))
    for row in rows:
        exact = row.get("worst_ledger_error", 0.0) == 0.0
        if not exact or ("raw" not in row["what"] and row.get("worst_wire_error", 0.0) > TOLERANCE):
            raise RuntimeError(f"wire, ledger and formula disagree: {row}")
    return {"rows": rows, "sequence_length": length, "tolerance": TOLERANCE}


def throughput(quick: bool) -> dict[str, Any]:
    """Time all schemes over slow links."""
    shape = Shape()
    rows: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for sweep in QUICK_SWEEPS if quick else SWEEPS:
        with Network(sweep.size) as network:
            core_flops = fmean(run_on_ranks(calibrate, shape, sweep.size, network))
            bytes_per_second = sweep.link.scaled_bytes(core_flops, shape.itemsize)
            network.limit(bytes_per_second)
            oversubscribed = is_oversubscribed(sweep.size)
            about = {"sweep": sweep.title, "oversubscribed": oversubscribed}
            links.append(
                {
                    **about,
                    "link": sweep.link.name,
                    "ranks": sweep.size,
                    "core_flops": core_flops,
                    "bytes_per_second": bytes_per_second,
                    "cluster_bytes_per_second": sweep.link.cluster_bytes,
                }
            )
            for length in sweep.lengths:
                print(f"  {sweep.title}, P = {sweep.size}, L = {length} ...", flush=True)
                comparison = Comparison(length, sweep.variants, 1 if quick else sweep.repeats(length), shape)
                summary = summarise(comparison, run_on_ranks(compare, comparison, sweep.size, network))
                rows.extend({**about, **row} for row in summary)
    inputs = {"h200_attention_flops": H200_ATTENTION_FLOPS, "h200_itemsize": H200_ITEMSIZE}
    return {"rows": rows, "links": links, "shape": asdict(shape), "head_groups": HEAD_GROUPS, **inputs}


def attention(quick: bool) -> dict[str, Any]:
    """Time the CPU path of one rank's attention."""
    lengths, repeats = ((512,), 1) if quick else ((1024, 4096), 9)

    def measure(world: RankWorld, length: int) -> dict[str, Any]:
        return attention_path.measure_attention_path(world, length, repeats)

    return {"rows": [run_on_ranks(measure, length, 1)[0] for length in lengths]}


def memory(quick: bool) -> dict[str, Any]:
    """Count what one layer saves and allocates."""
    lengths = (4096, 16_384, 32_768) if quick else (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
    return {
        "rows": on_paper.measure_memory(lengths),
        "model": on_paper.MODEL,
        "group_size": on_paper.MEMORY_GROUP_SIZE,
    }


def work(quick: bool) -> dict[str, Any]:
    """Count pairs computed against pairs allowed."""
    rows = on_paper.measure_useful_work((4,) if quick else (1, 2, 4, 5, 8, 32))
    return {"rows": rows, "group_size": on_paper.WORK_GROUP_SIZE}


def scale(quick: bool) -> dict[str, Any]:
    """Plan the models at cluster sizes."""
    lengths = (2**18,) if quick else tuple(2**power for power in range(16, 21))
    return on_paper.plan_at_scale(lengths, (8,) if quick else (2, 4, 8, 16, 32, 64))


def training(quick: bool) -> dict[str, Any]:
    """Train CP and CSBP for the same time on the link between nodes."""
    fixed = fixed_time.FixedTime()
    if quick:
        fixed = fixed_time.FixedTime(
            sequence_length=128, minutes=None, iterations=2, eval_interval=1, corpus_bytes=200_000
        )
    shape = Shape()
    with tempfile.TemporaryDirectory() as name, Network(fixed_time.RANKS) as network:
        folder = Path(name)
        core_flops = fmean(run_on_ranks(calibrate, shape, fixed_time.RANKS, network))
        corpus = fixed_time.prepare_corpus(folder, fixed)
        bytes_per_second = ACROSS_NODES.scaled_bytes(core_flops, shape.itemsize)
        network.limit(bytes_per_second)
        runs = [
            fixed_time.train(scheme, fixed, corpus, network, folder / f"{scheme}.log") for scheme in fixed_time.SCHEMES
        ]
    return {
        "link": ACROSS_NODES.name,
        "bytes_per_second": bytes_per_second,
        "minutes": fixed.minutes,
        "sequence_length": fixed.sequence_length,
        "runs": runs,
        "common": fixed_time.at_common_time(runs),
        "largest_difference": fixed_time.largest_difference(runs),
    }


def answers(quick: bool) -> dict[str, Any]:
    """Time iterations on packed conversations."""
    sizes = answers_only.Sizes()
    if quick:
        sizes = answers_only.Sizes(sequence_length=512, documents=60, mean_document=100, iterations=3, repeats=1)
    with tempfile.TemporaryDirectory() as folder:
        return answers_only.measure(Path(folder), sizes)


def converted(quick: bool) -> dict[str, Any]:
    """Convert a small model with every objective."""
    with tempfile.TemporaryDirectory() as folder:
        return conversion.measure(Path(folder), "quick" if quick else "full")


PARTS = {
    "wire": Part("Traffic: formula, ledger, wire", wire, needs_network=True),
    "throughput": Part("Throughput on slow links", throughput, needs_network=True),
    "attention": Part("The attention path on a CPU", attention),
    "memory": Part("Memory", memory),
    "work": Part("Useful work and balance", work),
    "scale": Part("On paper: cluster sizes", scale),
    "answers": Part("Only answers carry loss", answers),
    "conversion": Part("Conversion of an autoregressive model", converted),
    "training": Part("Same wall-clock, better model", training, needs_network=True),
}
