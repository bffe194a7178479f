# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.run`: measure, write results.json and plots, and regenerate RESULTS.md from them."""

import argparse
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from benchmarks.network import why_unavailable
from benchmarks.parts import PARTS
from benchmarks.readme import update_readme
from benchmarks.report import write_report

HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that the command line asks for; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A reduced run of each part, as in the tests.")
    parser.add_argument("--out", type=Path, help="Where to write. Default: benchmarks/.")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="Measure these parts; keep the results of the others."
    )
    parser.add_argument("--report", action="store_true", help="Measure nothing: regenerate the report.")
    options = parser.parse_args(argv)
    folder: Path = (options.out or HERE).resolve()
    if options.quick and folder == HERE:
        parser.error(
            "--quick needs --out with another folder, so that its figures do not replace those of a whole run."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be a folder to write to ({error}).")
    if options.report and not (folder / "results.json").exists():
        parser.error(f"--report: {folder} has no results.json; measure first.")
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that parts start: one core a rank
    results = _previous(folder) if options.only or options.report else {"parts": {}}
    failed = False
    for name in [] if options.report else options.only or PARTS:
        results["parts"][name] = _measure(name, options.quick)
        failed = failed or "failed" in results["parts"][name]
        results |= {"machine": machine(), "versions": versions(), "quick": options.quick}
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_report(results, folder)
    if folder == HERE:
        update_readme(results)
    print(f"wrote {folder / 'RESULTS.md'}", flush=True)
    return int(failed)


def _measure(name: str, quick: bool) -> dict[str, Any]:
    """Run one part. What could not be measured says so; what failed does not stop the others."""
    part = PARTS[name]
    print(f"{part.title} ...", flush=True)
    about: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m benchmarks.run", *sys.argv[1:]]),
        "load_average": os.getloadavg()[0],
    }
    if part.needs_network and (reason := why_unavailable()) is not None:
        print(f"  not measured: {reason}", flush=True)
        return {**about, "not_measured": reason}
    started = time.monotonic()
    try:
        about["result"] = part.measure(quick)
    except Exception:
        about["failed"] = traceback.format_exc()
        print(about["failed"], flush=True)
    about["seconds"] = round(time.monotonic() - started, 1)
    print(f"  {about['seconds']} s", flush=True)
    return about


def _previous(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    return results


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what ran."""
    packages = {name: version(name) for name in ("megatron-csbp", "megatron-core", "torch")}
    return {"python": platform.python_version(), **packages}


def _terminate(number: int, frame: FrameType | None) -> None:
    """Leave as an exception would, so that namespaces are removed."""
    print(f"benchmarks: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
