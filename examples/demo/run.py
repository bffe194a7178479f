# SPDX-License-Identifier: Apache-2.0
"""The demo: trains a small Nemotron-shaped model with CSBP on two ranks of this machine, and checks it.

    .venv/bin/python examples/demo/run.py            (or: make demo)

Writes everything below demo_output/ (or `--output`), which it empties first. Exit status 1 if the curves differ, the
loss does not fall, the bytes are not those of the closed form, or a step fails.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import corpus
from report import Traffic, compare, draw, print_parity, print_summary
from sizes import NUM_RANKS, PAPER_CASE, SIZES, Size
from training import DemoError, RunRecord, train

from megatron_csbp.data import prepare

ROOT = Path(__file__).resolve().parents[2]
MARKER = "made-by-the-demo"
MOST_THREADS = 4


def main() -> int:
    """Run every step; return the exit status."""
    parser = argparse.ArgumentParser(description="Train with CSBP on two ranks and compare with one rank.")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "demo_output", help="folder for all results; emptied first"
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="quick: a toy, for tests of the demo itself")
    args = parser.parse_args()
    try:
        return demo(args.output.resolve(), SIZES[args.size])
    except (DemoError, ValueError, OSError) as error:
        print(f"\ndemo: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
    return 1


def demo(output: Path, size: Size) -> int:
    """Prepare data, train, repeat, compare, report.

    Args:
        output: folder for all results.
        size: how much to do.
    """
    started = time.monotonic()
    empty(output)
    print(f"megatron_csbp demo: CSBP on {NUM_RANKS} ranks of this machine, checked against one rank. Output: {output}")
    flags = prepare_data(output, size)
    sharded = train_scheme("CSBP", NUM_RANKS, size, flags, output)
    baseline = train_scheme("CP", NUM_RANKS, size, flags, output)
    one_rank = train_scheme("one rank", 1, size, flags, output)
    parity = {"one rank": compare(one_rank, sharded), "CP": compare(baseline, sharded)}
    traffic = {
        scheme: Traffic.measure(scheme, size, output / f"{slug(scheme)}.rank0.jsonl") for scheme in ("CSBP", "CP")
    }
    picture = output / "curves.png"
    draw(sharded, parity["one rank"], picture)
    print_parity(parity["one rank"])
    failures = print_summary(size, sharded, parity, traffic, PAPER_CASE)
    record = {
        "size": asdict(size),
        "runs": {"CSBP": asdict(sharded), "CP": asdict(baseline), "one rank": asdict(one_rank)},
        "bytes per layer": {scheme: asdict(numbers) for scheme, numbers in traffic.items()},
        "failures": failures,
    }
    (output / "report.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"  curves      {picture}")
    print(f"  checkpoint  {output / 'checkpoint'}; the command that made it: {output / 'csbp.sh'}")
    print(f"  record      {output / 'report.json'}")
    print(f"  time        {time.monotonic() - started:.0f} s")
    for failure in failures:
        print(f"demo: FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def empty(output: Path) -> None:
    """Make the output folder, or empty the one of an earlier demo.

    Raises:
        DemoError: the folder holds something that no demo made.
    """
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).exists():
        raise DemoError(f"--output {output} is not empty and was not made by the demo; name another folder.")
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / MARKER).touch()


def prepare_data(output: Path, size: Size) -> list[str]:
    """Build the tokenizer and the indexed datasets; return the flags that name them."""
    print("\nData: the longest sources of Python's standard library", flush=True)
    *documents, held_out = corpus.standard_library_documents(size.corpus_bytes)
    tokenizer = output / "tokenizer"
    mask_token_id = corpus.build_tokenizer(documents, tokenizer, size.vocab_size)
    print(f"  tokenizer: BPE of {size.vocab_size} tokens, {corpus.MASK} = {mask_token_id}: {tokenizer}", flush=True)
    for name, texts in (("train", documents), ("valid", [held_out])):
        arguments = ["--input", *map(str, texts), "--tokenizer", str(tokenizer), "--append-eod"]
        arguments += ["--output-prefix", str(output / "data" / name)]
        (output / f"prepare-{name}.sh").write_text(
            f"{shlex.join([sys.executable, '-m', 'megatron_csbp.data.prepare', *arguments])}\n"
        )
        if prepare.main(arguments):
            raise DemoError("the text could not be prepared; the reason is above.")
    prefixes = ["--train-data-path", str(output / "data/train"), "--valid-data-path", str(output / "data/valid")]
    return [*prefixes, "--tokenizer-model", str(tokenizer), "--mask-token-id", str(mask_token_id)]


def train_scheme(scheme: str, num_ranks: int, size: Size, flags: list[str], output: Path) -> RunRecord:
    """Train under one scheme: to the end with CSBP, else the first iterations only.

    Args:
        scheme: CSBP, CP or one rank.
        num_ranks: ranks of the context group.
        size: how much to do.
        flags: of the data.
        output: folder for log and checkpoint.
    """
    arguments = [*size.flags(), *flags, "--context-parallel-size", str(num_ranks)]
    if num_ranks > 1:
        arguments += ["--csbp-ledger", str(output / f"{slug(scheme)}.jsonl")]
    iterations = size.iterations
    if scheme == "CSBP":
        arguments += ["--bp-size", str(num_ranks), "--save", str(output / "checkpoint")]
        arguments += ["--save-interval", str(size.iterations)]
        # The whole validation set each time, so that its points can be compared.
        arguments += ["--full-validation", "--multiple-validation-sets"]
    else:
        iterations = size.parity_iterations
        if scheme == "CP":
            arguments += ["--context-scheme", "cp"]
        arguments += ["--exit-interval", str(iterations), "--eval-iters", "0"]
    arguments += ["--eval-interval", str(size.evaluate_every)]
    name = f"Training, {scheme}" if scheme == "CSBP" else f"The first iterations again, {scheme}"
    threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // NUM_RANKS))
    return train(name, arguments, iterations, num_ranks, threads, output / f"{slug(scheme)}.log")


def slug(scheme: str) -> str:
    """Return a scheme's name as part of a file name."""
    return scheme.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
