# SPDX-License-Identifier: Apache-2.0
"""Entry: `python -m megatron_csbp.migrate FILE [--context-size P] [--block-size M] [--mask-token-id ID] [--ranks N]`.

Reads a launch script, a file of flags or a YAML file of an existing Megatron job; nothing in it is run and nothing is
written. Prints the change as a unified diff with the reason for each, and what stands in the way. Status 0: the
changed job would start; 1: something stands in the way; 2: a wrong command line.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_csbp.migrate.check import how_to_plan, refusal
from megatron_csbp.migrate.edits import Migration
from megatron_csbp.migrate.job_script import migrate_script
from megatron_csbp.migrate.rules import MASK_TOKEN_PLACEHOLDER, FlagRules, Wanted
from megatron_csbp.migrate.yaml_file import looks_like_yaml, migrate_yaml
from megatron_csbp.results import print_results


def main(arguments: Sequence[str] | None = None) -> int:
    """Migrate a file and print what changes.

    Args:
        arguments: command line; that of the process by default.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if not args.file.is_file():
        parser.error(f"FILE {args.file} is no file; give a launch script, a file of flags or a YAML file.")
    for flag in ("context_size", "block_size", "ranks"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} {value} must be at least 1; for example 8.")
    wanted = Wanted(args.context_size, args.block_size, args.mask_token_id)
    text = args.file.read_text(errors="surrogateescape")
    migrate = migrate_yaml if looks_like_yaml(args.file.name, text) else migrate_script
    try:
        migration = migrate(str(args.file), text, FlagRules(_flags()), wanted)
    except ValueError as error:
        parser.error(str(error))
    obstacles, notes = list(migration.obstacles), list(migration.notes)
    if wanted.mask_token is None:
        notes.append(
            f"replace {MASK_TOKEN_PLACEHOLDER} (docs/objectives.md#the-mask-token), or give --mask-token-id here"
        )
    if args.ranks is not None and not obstacles:
        obstacles += _checked(migration, args.ranks, notes)
    if not obstacles:
        notes.append(how_to_plan(migration.flags, migration.unknown, args.ranks))
    print_results(report(migration, obstacles, notes))
    return 1 if obstacles else 0


def report(migration: Migration, obstacles: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Return what is printed: the diff first, so that `patch` takes it, and then what it does."""
    edits = sorted(migration.edits, key=lambda edit: edit.start)
    lines = [migration.diff, "What changes:"]
    lines += [f"  line {edit.line}: {edit.reason}" for edit in edits]
    lines += ["To do and to know:", *(f"  {note}" for note in notes)] if notes else []
    lines += ["What stands in the way:", *(f"  {obstacle}" for obstacle in obstacles)] if obstacles else []
    return lines if obstacles else [*lines, "Nothing stands in the way."]


def _checked(migration: Migration, ranks: int, notes: list[str]) -> list[str]:
    """Ask the check mode, where all is known that it needs."""
    if migration.flags[:1] == ["--yaml-cfg"]:
        notes.append(
            f"check the changed file with: python -m megatron_csbp.pretrain_gpt --yaml-cfg FILE --csbp-dry-run {ranks}"
        )
        return []
    why = refusal(migration.flags, ranks)
    names = " ".join(dict.fromkeys(migration.unknown))
    left_out = f"; not checked, since the script does not know their values: {names}"
    notes.append(
        f"the check mode was asked about {ranks} rank(s), with stand-ins for data, tokenizer and checkpoints"
        f"{left_out if migration.unknown else ''}"
    )
    return [] if why is None else [f"at its start: {why}"]


def _flags() -> argparse.ArgumentParser:
    """Return Megatron's parser with this package's flags."""
    from megatron_csbp import cpu_runtime
    from megatron_csbp.errors import hush_optional_packages

    hush_optional_packages()
    cpu_runtime.install("cpu")

    from megatron_csbp import megatron_arguments
    from megatron_csbp.arguments import add_arguments

    return add_arguments(megatron_arguments.argument_parser())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_csbp.migrate",
        description="Make an existing Megatron job one of block diffusion. Nothing is run or written.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="A launch script, a file of flags, or a YAML file.")
    parser.add_argument(
        "--context-size", type=int, metavar="P", help="Ranks that share a sequence; by default as the job has it."
    )
    parser.add_argument("--block-size", type=int, default=32, metavar="M", help="Tokens of a diffusion block (32).")
    parser.add_argument("--mask-token-id", type=int, metavar="ID", help="The mask token, where you know it already.")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="Also ask the check mode whether the changed job would start on N ranks.",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
