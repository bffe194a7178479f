# SPDX-License-Identifier: Apache-2.0
"""Launch arguments: would they start, and what do they come to?"""

import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_csbp.child_process import run_python
from megatron_csbp.configuration.config_file import switches_and_values, take_yaml_flag
from megatron_csbp.doctor.findings import Finding, fail, ok

_SIZES = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "block-parallel-size")


@dataclass(frozen=True)
class Job:
    """What a command line comes to.

    Attributes:
        findings: whether it would start.
        summary: the start summary, as rank 0 would print it.
        arguments: every argument of the run, by flag.
        folders: that the run writes into.
        tensor: tensor-parallel size.
        context: size of a context group.
        gather_bytes: what a gather of an attention layer brings a rank from others.
    """

    findings: list[Finding]
    summary: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    tensor: int = 1
    context: int = 1
    gather_bytes: int = 0


def check_job(words: Sequence[str], ranks: int | None) -> Job:
    """Run every check of a start in a process of its own.

    Args:
        words: launch arguments, as the entry takes them.
        ranks: of the job; None for as few as the sizes need.
    """
    number = least_ranks(words) if ranks is None else ranks
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "resolved.json")
        ended = run_python("-W", "ignore", "-m", "megatron_csbp.doctor.resolve", str(file), str(number), *words)
        resolved = json.loads(file.read_text()) if file.exists() else None
    if resolved is None:
        fix = "change the command as the message says; docs/troubleshooting.md lists the messages"
        return Job([fail("launch arguments", ended.refusal, fix)])
    detail = f"every check of a start passed; the job would start on {number} rank(s)"
    return Job([ok("launch arguments", detail)], _summary(ended.output), **resolved)


def least_ranks(words: Sequence[str]) -> int:
    """Return the product of the sizes that a command line names; the context group counts once."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _SIZES:
        parser.add_argument(f"--{name}", *(["--bp-size"] if name.startswith("block") else []), dest=name)
    yaml_path, rest = take_yaml_flag(words)
    values = vars(parser.parse_known_args(rest)[0])
    from_file = switches_and_values(yaml_path) if yaml_path is not None else {}
    from_file = {name.replace("_", "-"): value for name, value in from_file.items()}
    from_file.setdefault("block-parallel-size", from_file.get("bp-size"))
    tensor, pipeline, context, block = (
        int(found) if (found := str(values[name] or from_file.get(name) or 1)).isdigit() else 1 for name in _SIZES
    )
    return tensor * pipeline * max(context, block)


def _summary(output: str) -> list[str]:
    """Return the lines of the start summary, which two lines of dashes enclose."""
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("-") and " megatron_csbp " in line), None)
    if first is None:
        return []
    last = next((i for i in range(first + 1, len(lines)) if set(lines[i]) == {"-"}), len(lines) - 1)
    return lines[first + 1 : last]
