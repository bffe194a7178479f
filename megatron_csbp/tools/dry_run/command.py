# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m megatron_csbp.dry_run`."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_csbp.results import check_json_file, print_results, write_json
from megatron_csbp.tools.dry_run.lengths import with_lengths_in_tokens

DOES_NOT_FIT = 1
"""Exit status of a job that would start and run out of memory; 2 is that of one that would not start."""
_STANDARD_OUTPUT = Path("-")
_EPILOG = """\
All other words are flags of Megatron's and of megatron_csbp's, as for pretrain_gpt; lengths may be written as 256K.
Exit status: 0 every check passed and every kind of rank fits; 1 a rank does not fit; 2 refused: a rule is broken, a
path is wrong, or the planner has no model of something."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the planner's own flags."""
    found = argparse.ArgumentParser(
        prog="python -m megatron_csbp.dry_run",
        usage="%(prog)s [RECIPE.yaml] --gpus N [options] [flags of pretrain_gpt ...]",
        description="Would this job start, does it fit, what does it move and how long does it take? Without a GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of the whole job, one rank each.")
    found.add_argument("--gpu", default="h200", help="GPU in the tables: h200 (default), h100, a100, or of --tables.")
    found.add_argument(
        "--gpus-per-node",
        type=int,
        default=None,
        metavar="N",
        help="GPUs that share the fast link. Default: LOCAL_WORLD_SIZE where it is set, else the GPU's table.",
    )
    found.add_argument("--tables", type=Path, metavar="FILE", help="YAML with further gpus, links and models.")
    found.add_argument("--compare", metavar="SCHEMES", help="The same job by scheme, such as cp,bp,csbp.")
    found.add_argument("--sweep", action="store_true", help="All topologies that divide the cluster, best first.")
    found.add_argument(
        "--tiles", action="store_true", help="Also what each tile of one attention layer would cost on an H200."
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="Write all of it as JSON; - for standard output.")
    return found


def run(argv: Sequence[str], runtime: Any) -> int:
    """Check and plan what a command line asks for, print it, and return the exit status.

    Args:
        argv: the command line without the program.
        runtime: the device of this process.

    Raises:
        ValueError: a flag is wrong, the job would not start, or the planner has no model of a part of it.
    """
    from megatron_csbp.tools.dry_run import as_json, text
    from megatron_csbp.tools.dry_run.checked_job import check_job, without_exchange_defaults
    from megatron_csbp.tools.dry_run.plan import Cluster, compare, make_plan
    from megatron_csbp.tools.dry_run.sweep import sweep
    from megatron_csbp.tools.dry_run.tables import read_tables

    options, words = split(argv)
    tables = read_tables(options.tables)
    gpu = tables.gpu(options.gpu)
    node = options.gpus_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", gpu.node))
    checked = check_job(words, options.gpus, runtime, node)
    if options.tiles and checked.job.packed is not None:
        raise ValueError(
            "--tiles has the tiles of samples of one document, not of --pack-documents; plan without --tiles."
        )
    cluster = Cluster(tables, options.gpu, node)
    plan = make_plan(checked.job, cluster)
    document = as_json.plan_json(plan) | {"not_checked": list(checked.not_checked)}
    lines = text.plan_lines(plan, checked.not_checked)
    if options.compare is not None:
        plans = compare(checked.job, cluster, options.compare.split(","))
        document["compare"] = as_json.comparison_json(plans)
        lines += text.comparison_lines(plans)
    if options.sweep:
        candidates = sweep(without_exchange_defaults(checked.job), cluster)
        document["sweep"] = as_json.sweep_json(candidates)
        lines += text.sweep_lines(candidates)
    if options.tiles:
        lines += tile_lines(checked.job)
    if options.json == _STANDARD_OUTPUT:
        lines = [json.dumps(document, indent=1)]
    elif options.json is not None:
        write_json(options.json, document)
    print_results(lines)
    return 0 if plan.fits else DOES_NOT_FIT


def split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the planner's own options and the words that are the job's command line.

    Raises:
        ValueError: an option is wrong.
    """
    from megatron_csbp.errors import say_errors_in_one_line

    words = list(argv)
    if words and not words[0].startswith("-"):
        words[:1] = ["--yaml-cfg", words[0]]
    own = parser()
    say_errors_in_one_line(own)
    options, rest = own.parse_known_args(words)
    for flag, value in (("--gpus", options.gpus), ("--gpus-per-node", options.gpus_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value} must be at least 1; for example {flag} 8.")
    if options.json not in (None, _STANDARD_OUTPUT):
        check_json_file(options.json)
    return options, with_lengths_in_tokens(rest)


def tile_lines(job: Any) -> list[str]:
    """Return what each tile of one attention layer of the last rank would cost."""
    from megatron_csbp.reporting.attention_model import Heads, tile_report

    heads = Heads(
        num_query_heads=job.network.query_heads // job.topology.tensor,
        num_key_value_heads=job.local_key_heads,
        head_dim=job.network.head_dim,
    )
    title = f"L = {job.length}, P = {job.topology.context}, one layer of the last rank [modelled, H200]"
    return [title, *tile_report(job.length, job.topology.context, job.block_size, job.clean_attention, heads)]
