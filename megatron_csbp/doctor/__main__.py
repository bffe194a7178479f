# SPDX-License-Identifier: Apache-2.0
"""Entry: `python -m megatron_csbp.doctor [--json] [--folder DIR ...] [--ranks N] [launch arguments ...]`.

Looks at packages, devices, limits, folders and the network; with launch arguments, also at the job that they describe;
under torchrun or srun, also at what only several ranks can find out. Status 0 if nothing fails, else 1; 2 for a
wrong command line.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from megatron_csbp.doctor.findings import Finding, State, failed
from megatron_csbp.doctor.job import Job, check_job
from megatron_csbp.doctor.launcher import place
from megatron_csbp.doctor.one_machine import check_folders, check_machine
from megatron_csbp.results import print_results


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at everything, print it, and return the exit status.

    Args:
        arguments: command line; that of the process by default.
    """
    parser = _parser()
    args, words = parser.parse_known_args(arguments)
    words = [word for word in words if word != "--"]
    if args.ranks is not None and args.ranks < 1:
        parser.error(f"--ranks {args.ranks} must be at least 1; for example 8.")
    try:
        here = place(os.environ)
    except ValueError as error:
        parser.error(str(error))
    if here is None:
        job = check_job(words, args.ranks) if words else None
        findings = [*check_machine(), *check_folders(args.folder, job), *(job.findings if job is not None else [])]
    else:
        # It imports PyTorch, which the checks of this machine may find broken.
        from megatron_csbp.doctor.many_ranks import look_from_all

        findings, job = look_from_all(here, words, args.ranks, args.folder)
    if not findings:  # rank 0 speaks, and ends, for all that met it
        return 0
    print_results([json.dumps(_as_json(findings, job), indent=1)] if args.json else _lines(findings, job))
    return 1 if failed(findings) else 0


def _lines(findings: Sequence[Finding], job: Job | None) -> list[str]:
    lines = []
    if job is not None and job.arguments:
        width = max(map(len, job.arguments))
        lines += [
            "resolved configuration:",
            *(f"  {name.ljust(width)}  {job.arguments[name]}" for name in job.arguments),
        ]
        lines += ["", "start summary:", *job.summary, ""]
    lines += [line for finding in findings for line in finding.lines]
    number = {state: sum(finding.state is state for finding in findings) for state in State}
    verdict = "sound" if not number[State.FAIL] else "not sound"
    return [*lines, f"doctor: {verdict}: {number[State.FAIL]} failure(s), {number[State.WARN]} warning(s)"]


def _as_json(findings: Sequence[Finding], job: Job | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sound": not failed(findings),
        "findings": [finding.as_json() for finding in findings],
    }
    if job is not None:
        found |= {"arguments": job.arguments, "summary": job.summary}
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_csbp.doctor",
        description="Is this machine, this cluster, this job sound? All other arguments are those of the training "
        "entry, and are checked as it would. Under torchrun or srun it also looks at what only several ranks see.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument(
        "--folder", action="append", default=[], metavar="DIR", help="Also try DIR; by default the working directory."
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="Ranks of the job; by default as many as run, or as the sizes need."
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
