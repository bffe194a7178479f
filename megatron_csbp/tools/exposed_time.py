# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_csbp.tools.exposed_time TRACE.json ...`: exposed communication from a trace of torch.profiler.

Exposed is the time in which collectives run on a GPU and nothing else does. A trace costs the run nothing that the
figure would contain: no events on its streams, which `--csbp-timing` needs.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_csbp.results import print_results

type Interval = tuple[float, float]

_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class Exposed:
    """One GPU's time in a trace, in microseconds.

    Attributes:
        device: number of the GPU.
        collectives: time in which a collective runs.
        exposed: the part of it in which nothing else runs.
        total: from the first command to the last.
    """

    device: int
    collectives: float
    exposed: float
    total: float


def exposed_time(events: Iterable[dict[str, Any]]) -> list[Exposed]:
    """Return the times of each GPU.

    Args:
        events: `traceEvents` of a trace in Chrome's format.
    """
    collectives: dict[int, list[Interval]] = {}
    others: dict[int, list[Interval]] = {}
    for event in events:
        if event.get("cat") not in _ON_GPU:
            continue
        device, start = int(event.get("args", {}).get("device", 0)), float(event["ts"])
        found = collectives if "nccl" in event.get("name", "").lower() else others
        found.setdefault(device, []).append((start, start + float(event.get("dur", 0.0))))
    results = []
    for device in sorted(collectives.keys() | others.keys()):
        sent, computed = _union(collectives.get(device, [])), _union(others.get(device, []))
        whole = _union([*sent, *computed])
        hidden = _length(sent) + _length(computed) - _length(whole)
        total = whole[-1][1] - whole[0][0]
        results.append(Exposed(device, _length(sent), _length(sent) - hidden, total))
    return results


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _length(disjoint: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in disjoint)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each GPU of each trace."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_csbp.tools.exposed_time", description="Exposed communication from profiler traces."
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path, help="A .json or .json.gz of torch.profiler.")
    try:
        print_results([line for path in parser.parse_args(argv).traces for line in _lines(path)])
    except ValueError as error:
        parser.error(str(error))


def _lines(path: Path) -> list[str]:
    """Return a line for each GPU of a trace; a ValueError says what else the file is."""
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(text)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of torch.profiler ({type(error).__name__}: {error})") from error
    found = exposed_time(events)
    if not found:
        raise ValueError(f"{path} has no GPU in it; profile with ProfilerActivity.CUDA.")
    return [
        f"{path} GPU {gpu.device}: {gpu.total / 1e3:.3f} ms, collectives {gpu.collectives / 1e3:.3f} ms, "
        f"of which exposed {gpu.exposed / 1e3:.3f} ms ({gpu.exposed / gpu.total:.1%} of the time)"
        for gpu in found
    ]


if __name__ == "__main__":
    main()
