# SPDX-License-Identifier: Apache-2.0
"""A command line, taken through every check of a start as the entries do with `--csbp-dry-run`, as a `Job`."""

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_csbp import check_mode
from megatron_csbp.configuration.changes import Change
from megatron_csbp.configuration.config_file import switches_and_values, take_yaml_flag
from megatron_csbp.cpu_runtime import RuntimeInfo
from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.network import Parameters

_DATA_FLAGS = (
    "--data-path",
    "--data-args-path",
    "--per-split-data-args-path",
    "--train-data-path",
    "--mock-data",
)
_TOKENIZER_FLAGS = ("--tokenizer-model", "--vocab-file")


@dataclass(frozen=True)
class CheckedJob:
    """A job that would start.

    Attributes:
        job: what it is.
        built: parameters of the model that was built for each kind of rank, by pipeline stage.
        not_checked: what the command line leaves open, and was not checked.
        summary: the start summary, as an entry prints it.
    """

    job: Job
    built: Mapping[int, Parameters]
    not_checked: tuple[str, ...]
    summary: str


def check_job(words: Sequence[str], gpus: int, runtime: RuntimeInfo, node: int) -> CheckedJob:
    """Check a command line as a job of so many ranks would at its start, and build its model without memory.

    Args:
        words: Megatron's and this package's flags.
        gpus: ranks of the job.
        runtime: the device of this process.
        node: ranks of a node, which messages name.

    Raises:
        ValueError: the job would not start, or the planner has no model of a part of it.
    """
    from megatron_csbp import arguments, megatron_planning, training_setup
    from megatron_csbp.errors import failure_in_words
    from megatron_csbp.tools.dry_run.from_args import job_from_args
    from megatron_csbp.tools.dry_run.meta_model import built_parameters, check_built

    filled, not_checked = fill_what_is_open(words)
    given = [*filled, check_mode.FLAG, str(gpus)]
    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    check_mode.stand_in_for_launcher(given)
    changes: list[Change] = []
    before, sys.argv = sys.argv, ["dry_run", *given]
    said = io.StringIO()
    megatron_planning.forget_arguments()
    try:
        with contextlib.redirect_stdout(said):
            args = training_setup.parse_and_validate_args(
                runtime,
                args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
                set_defaults=check_mode.leave_data_open if not_checked else None,
                changes=changes,
            )
            if not arguments.is_block_diffusion(args):
                raise ValueError(
                    "--diffusion-block-size is not given: this is a plain autoregressive job, which is not planned; "
                    f"add block-diffusion flags, or check it alone with pretrain_gpt {check_mode.FLAG} {gpus}."
                )
            with failure_in_words("check of the model"):
                config = training_setup.model_config_from_args(args)
            job = job_from_args(args, config.transformer, changes)
            built = built_parameters(args, config, job)
    finally:
        sys.argv = before
    check_built(built, job)
    return CheckedJob(job, built, not_checked, _start_summary(said.getvalue()))


def fill_what_is_open(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return a command line that can be checked without data and tokenizer, and what it left open.

    A recipe leaves both to the command line; what is given is checked.
    """
    path, _ = take_yaml_flag(list(words))
    in_file = {f"--{name.replace('_', '-')}" for name in switches_and_values(path)} if path is not None else set()
    given = {word.split("=")[0] for word in words if word.startswith("--")} | in_file
    filled, left = list(words), []
    if not given.intersection(_DATA_FLAGS):
        filled.append("--mock-data")
        left.append("data (no --data-path)")
    kind = _value("--tokenizer-type", words, path)
    if kind not in (None, "NullTokenizer") and not given.intersection(_TOKENIZER_FLAGS):
        rows = _value("--padded-vocab-size", words, path)
        if rows is not None:
            filled += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(int(rows) - 1)]
            left.append(f"tokenizer (no --tokenizer-model for {kind})")
    return filled, tuple(left)


def _value(flag: str, words: Sequence[str], path: Path | None) -> str | None:
    """Return the last value of a flag on the command line, or what the file says."""
    for index in range(len(words) - 1, -1, -1):
        name, equals, value = words[index].partition("=")
        if name == flag:
            return value if equals else words[index + 1] if index + 1 < len(words) else None
    found = switches_and_values(path).get(flag.lstrip("-").replace("-", "_")) if path is not None else None
    return None if found is None else str(found)


def _start_summary(said: str) -> str:
    lines = said.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("---------------- megatron_csbp")), len(lines))
    return "\n".join(lines[first:])


def without_exchange_defaults(job: Job) -> Job:
    """Return a job whose head groups and loss chunks are chosen from sizes: for another scheme or topology."""
    return replace(job, head_groups=None, chunk_rows=None)
