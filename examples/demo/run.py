# SPDX-License-Identifier: Apache-2.0
"""The demo: trains a small autoregressive model, converts it to block diffusion with CSBP, and lets it write.

    .venv/bin/python examples/demo/run.py            (or: make demo)

Everything runs on two ranks of this machine. The conversion is checked against one rank and the CP baseline, and
compared with the same training from scratch. Writes everything below demo_output/ (or `--output`), which it empties
first. Exit status 1 if the losses of the topologies differ, the model does not use context, the bytes are not those of
the closed form, or a step fails.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import corpus
from picture import draw
from report import Traffic, compare, print_parity, print_summary
from sizes import NUM_RANKS, PAPER_CASE, SIZES, Size
from training import DemoError, RunRecord, run_command, train

from megatron_csbp.data import prepare
from megatron_csbp.data.train_tokenizer import MASK_TOKEN, train_tokenizer
from megatron_csbp.objectives import OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]
MARKER = "made-by-the-demo"
MOST_THREADS = 4
PROMPT = "class Reader:\n    def __init__(self, name):\n        self.name = name\n\n    def read(self"


def main() -> int:
    """Run every step; return the exit status."""
    parser = argparse.ArgumentParser(description="Convert an autoregressive model to block diffusion, with CSBP.")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "demo_output", help="folder for all results; emptied first"
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="quick: a toy, for tests of the demo itself")
    parser.add_argument("--objective", choices=OBJECTIVES, default="fast-dllm-v2", help="of the conversion")
    args = parser.parse_args()
    try:
        return demo(args.output.resolve(), SIZES[args.size], args.objective)
    except (DemoError, ValueError, OSError) as error:
        print(f"\ndemo: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
    return 1


def demo(output: Path, size: Size, objective: str) -> int:
    """Prepare data, train, convert, repeat, compare, write, report.

    Args:
        output: folder for all results.
        size: how much to do.
        objective: of the conversion, as for `--diffusion-objective`.
    """
    started = time.monotonic()
    empty(output)
    print(f"megatron_csbp demo, objective {objective}, on {NUM_RANKS} ranks of this machine. Output: {output}")
    data, entropy = prepare_data(output, size)
    diffusion = [*data, "--diffusion-objective", objective]
    runs = {
        "autoregressive": train_autoregressive(size, data, output),
        "converted": diffuse("converted", NUM_RANKS, size, diffusion, output),
        "from scratch": diffuse("from scratch", NUM_RANKS, size, diffusion, output),
    }
    again = {
        name: diffuse(name, ranks, size, diffusion, output) for name, ranks in (("CP", NUM_RANKS), ("one rank", 1))
    }
    parity = {name: compare(run, runs["converted"]) for name, run in again.items()}
    traffic = {
        "CSBP": Traffic.measure("CSBP", size, objective, output / "converted.rank0.jsonl"),
        "CP": Traffic.measure("CP", size, objective, output / "cp.rank0.jsonl"),
    }
    draw(size, runs, parity, entropy, output / "curves.png")
    print_parity(parity["one rank"])
    text = write(size, output)
    failures = print_summary(size, runs, entropy, parity, traffic, PAPER_CASE)
    record = {
        "size": asdict(size),
        "objective": objective,
        "entropy of single tokens": entropy,
        "runs": {name: asdict(run) for name, run in (runs | again).items()},
        "bytes per layer": {scheme: asdict(numbers) for scheme, numbers in traffic.items()},
        "text": text,
        "failures": failures,
    }
    (output / "report.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"  curves      {output / 'curves.png'}")
    print(f"  checkpoint  {output / 'converted'}; the command that made it: {output / 'converted.sh'}")
    print(f"  record      {output / 'report.json'}")
    print(f"  time        {time.monotonic() - started:.0f} s, of processors {processor_seconds():.0f} s")
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


def prepare_data(output: Path, size: Size) -> tuple[list[str], float]:
    """Build the tokenizer and the indexed datasets.

    Returns:
        The flags that name them, and the entropy of the validation text's single tokens, in nats.
    """
    print("\nData: the longest sources of Python's standard library", flush=True)
    documents = corpus.standard_library_documents(size.corpus_bytes)
    held_out = corpus.held_out_document(size.held_out_bytes, documents)
    tokenizer = output / "tokenizer"
    texts = (document.read_text(encoding="utf-8") for document in documents)
    num_tokens, mask_token_id = train_tokenizer(texts, tokenizer, size.vocab_size)
    assert mask_token_id == corpus.MASK_ID
    print(f"  tokenizer: BPE of {num_tokens} tokens, {MASK_TOKEN} = {mask_token_id}; validation text: {held_out}")
    for name, paths in (("train", documents), ("valid", [held_out])):
        arguments = ["--input", *map(str, paths), "--tokenizer", str(tokenizer), "--append-eod"]
        arguments += ["--output-prefix", str(output / "data" / name)]
        (output / f"prepare-{name}.sh").write_text(
            f"{shlex.join([sys.executable, '-m', 'megatron_csbp.data.prepare', *arguments])}\n"
        )
        if prepare.main(arguments):
            raise DemoError("the text could not be prepared; the reason is above.")
    data = ["--train-data-path", str(output / "data/train"), "--valid-data-path", str(output / "data/valid")]
    # The whole validation set each time, so that its points can be compared.
    data += ["--full-validation", "--multiple-validation-sets", "--tokenizer-model", str(tokenizer)]
    return data, corpus.entropy_of_tokens(output / "data" / "valid")


def train_autoregressive(size: Size, data: list[str], output: Path) -> RunRecord:
    """Train the model that is to be converted: plain Megatron, data parallel."""
    arguments = [*size.flags(), *size.autoregressive.flags(), *data]
    arguments += saving(output / "autoregressive", size.autoregressive.iterations)
    iterations = size.autoregressive.iterations
    return train(
        "Training, autoregressive", arguments, iterations, NUM_RANKS, threads(), output / "autoregressive.log"
    )


def diffuse(name: str, num_ranks: int, size: Size, data: list[str], output: Path) -> RunRecord:
    """Train on blocks: to the end, or the first iterations only.

    Args:
        name: "converted" and "from scratch" are whole trainings with CSBP; "CP" and "one rank" begin the first again.
        num_ranks: ranks of the context group.
        size: how much to do.
        data: flags that name data and objective.
        output: folder for log and checkpoint.
    """
    whole = name in ("converted", "from scratch")
    arguments = [*size.flags(), *size.diffusion.flags(), *data, "--diffusion-block-size", str(size.block_size)]
    arguments += ["--mask-token-id", str(corpus.MASK_ID), "--context-parallel-size", str(num_ranks)]
    if name != "from scratch":
        arguments += ["--load", str(output / "autoregressive"), "--finetune", "--no-load-optim", "--no-load-rng"]
    if num_ranks > 1:
        arguments += ["--csbp-ledger", str(output / f"{slug(name)}.jsonl")]
    iterations = size.diffusion.iterations
    if whole:
        arguments += ["--bp-size", str(num_ranks), *saving(output / slug(name), iterations)]
        title = f"Training with CSBP, {name}"
    else:
        iterations = size.parity_iterations
        arguments += ["--exit-interval", str(iterations), "--eval-iters", "0", "--eval-interval", "1000"]
        arguments += ["--context-scheme", "cp"] if name == "CP" else []
        title = f"The first iterations of the conversion again, {name}"
    return train(title, arguments, iterations, num_ranks, threads(), output / f"{slug(name)}.log")


def write(size: Size, output: Path) -> str:
    """Let the converted model continue a prompt; return the text."""
    print("\nA continuation by the converted model, block by block", flush=True)
    arguments = ["-m", "megatron_csbp.generate", "--load", str(output / "converted"), "--prompt", PROMPT]
    arguments += ["--max-new-tokens", str(size.new_tokens), "--confidence-threshold", "0.6", "--show-steps"]
    arguments += ["--temperature", "0.7"]
    lines = run_command([sys.executable, *arguments], threads() * NUM_RANKS, output / "generate.log").splitlines(True)
    steps = [line for line in lines if line.startswith("[") and " pass " in line]
    print("  the first passes over a block (_ is a mask):")
    for line in steps[:4]:
        print(f"    {line.rstrip()}")
    text = "".join(line for line in lines if line not in steps)
    print("  the text:")
    print("".join(f"    | {line}\n" for line in text.rstrip().splitlines()), flush=True)
    return text


def saving(folder: Path, iterations: int) -> list[str]:
    """Return the flags that save the weights at the end of a run."""
    return ["--save", str(folder), "--save-interval", str(iterations), "--no-save-optim", "--no-save-rng"]


def threads() -> int:
    """Return how many processor threads a rank gets."""
    return min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // NUM_RANKS))


def processor_seconds() -> float:
    """Return the time that processors have spent on this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def slug(name: str) -> str:
    """Return a run's name as part of a file name."""
    return name.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
