# SPDX-License-Identifier: Apache-2.0
"""Same wall-clock, which model is better: CP and CSBP train it through the real entry on the same slow link."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network import INTERFACE, Network
from benchmarks.ranks import cores
from examples.demo.corpus import standard_library_documents
from megatron_csbp.data import prepare
from megatron_csbp.data.train_tokenizer import train_tokenizer

ROOT = Path(__file__).parents[1]
RANKS = 2
PORT = 29500
VOCABULARY = 258
"""Bytes and two special tokens: a vocabulary that a small model learns within the time."""
VALIDATION_SEQUENCES = 16
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    "--kv-channels 32 --ffn-hidden-size 384 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --make-vocab-size-divisible-by 128 --init-method-std 0.05 --csbp-head-groups 2"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 4e-3 --lr-decay-style constant --lr-decay-iters 10000 "
    "--lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --num-workers 0 --seed 7 "
    "--log-interval 1 --diffusion-block-size 32 --diffusion-objective nemotron --full-validation "
    "--multiple-validation-sets"
)
SCHEMES = {
    "CP": ["--context-parallel-size", str(RANKS), "--context-scheme", "cp"],
    "CSBP": ["--context-parallel-size", str(RANKS), "--bp-size", str(RANKS)],
}
_ITERATION = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+) .*lm loss: ([\d.E+-]+)")
_VALIDATION = re.compile(
    r"validation\S* loss at iteration (\d+) \| lm loss value: ([\d.E+-]+) .*nelbo value: ([\d.E+-]+)"
)


@dataclass(frozen=True, kw_only=True)
class FixedTime:
    """What the two runs share.

    Attributes:
        sequence_length: L.
        minutes: wall-clock budget of a run, its start included (`--exit-duration-in-mins`); None for no budget.
        iterations: upper bound of `--train-iters`.
        eval_interval: iterations between validations.
        corpus_bytes: text to train on.
    """

    sequence_length: int = 1024
    minutes: int | None = 3
    iterations: int = 10_000
    eval_interval: int = 15
    corpus_bytes: int = 3_000_000

    @property
    def flags(self) -> list[str]:
        """The flags of both runs that depend on these."""
        length = str(self.sequence_length)
        flags = ["--seq-length", length, "--max-position-embeddings", length, "--train-iters", str(self.iterations)]
        flags += ["--eval-interval", str(self.eval_interval), "--eval-iters", "1"]
        return flags if self.minutes is None else [*flags, "--exit-duration-in-mins", str(self.minutes)]


@dataclass(frozen=True)
class Corpus:
    """Text that is ready for training.

    Attributes:
        tokenizer: folder of the tokenizer.
        data_flags: flags that name the data.
        mask_token_id: id of the mask token.
    """

    tokenizer: Path
    data_flags: list[str]
    mask_token_id: int


def prepare_corpus(folder: Path, fixed: FixedTime) -> Corpus:
    """Tokenize sources of Python's standard library; the beginning of one that is not trained on is for validation."""
    held_out, *documents = standard_library_documents(fixed.corpus_bytes)
    tokenizer = folder / "tokenizer"
    texts = (document.read_text(encoding="utf-8") for document in documents)
    _, mask_token_id = train_tokenizer(texts, tokenizer, VOCABULARY)
    excerpt = folder / "valid.txt"
    # One token a byte, for documents without characters beyond ASCII.
    excerpt.write_bytes(held_out.read_bytes()[: VALIDATION_SEQUENCES * fixed.sequence_length])
    flags = []
    for part, paths in (("train", documents), ("valid", [excerpt])):
        arguments = ["--tokenizer", str(tokenizer), "--append-eod", "--output-prefix", str(folder / part)]
        if prepare.main([*arguments, "--input", *map(str, paths)]):
            raise RuntimeError("the text could not be prepared; the reason is above")
        flags += [f"--{part}-data-path", str(folder / part)]
    return Corpus(tokenizer, flags, mask_token_id)


def train(scheme: str, fixed: FixedTime, corpus: Corpus, network: Network, log: Path) -> dict[str, Any]:
    """Run the entry on every rank and return its curves.

    Args:
        scheme: key of SCHEMES.
        fixed: what the runs share.
        corpus: what they train on.
        network: where they run.
        log: file for what the last rank prints.

    Raises:
        RuntimeError: a rank failed; the message holds the end of its output.
    """
    flags = command_line(scheme, fixed, corpus)
    processes = []
    try:
        for rank in range(RANKS):
            output = log if rank == RANKS - 1 else log.with_suffix(f".rank{rank}")
            with output.open("w") as file:
                processes.append(_start_rank(rank, flags, network, file))
        failed = [process.returncode for process in processes if process.wait() != 0]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failed:
        raise RuntimeError(f"{scheme}: exit status {failed}\n" + "\n".join(log.read_text().splitlines()[-30:]))
    return {"scheme": scheme, "flags": [flag for flag in flags if "/" not in flag]} | read_curves(log.read_text())


def command_line(scheme: str, fixed: FixedTime, corpus: Corpus) -> list[str]:
    """Return the arguments of the entry."""
    flags = [
        *MODEL.split(),
        *TRAINING.split(),
        *fixed.flags,
        *SCHEMES[scheme],
        "--mask-token-id",
        str(corpus.mask_token_id),
    ]
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(corpus.tokenizer)]
    return [*flags, *tokenizer, *corpus.data_flags]


def _start_rank(rank: int, flags: Sequence[str], network: Network, output: Any) -> subprocess.Popen[bytes]:
    available = cores()
    command = ["ip", "netns", "exec", network.namespace(rank), "taskset", "-c", str(available[rank % len(available)])]
    command += [sys.executable, "-m", "megatron_csbp.pretrain_gpt", *flags]
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def read_curves(log: str) -> dict[str, Any]:
    """Read the training loss and the validation bound of each iteration from a log.

    The clock adds up the iterations' own times, so it stands still during validation.

    Args:
        log: what the last rank printed.

    Returns:
        `iterations`: number, seconds on the clock, loss; `validations`: number, seconds on the clock, loss, NELBO.
    """
    iterations: list[dict[str, float]] = []
    validations: list[dict[str, float]] = []
    seconds = 0.0
    for line in log.splitlines():
        if found := _ITERATION.search(line):
            seconds += float(found[2]) / 1000
            iterations.append({"iteration": int(found[1]), "seconds": seconds, "loss": float(found[3])})
        elif found := _VALIDATION.search(line):
            point = {"iteration": int(found[1]), "seconds": seconds}
            validations.append({**point, "loss": float(found[2]), "nelbo": float(found[3])})
    return {"iterations": iterations, "validations": validations}


def at_common_time(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what each run had reached when the shorter clock stopped: its last validation before that moment."""
    common = min(run["iterations"][-1]["seconds"] for run in runs)
    reached = {}
    for run in runs:
        done = [point for point in run["iterations"] if point["seconds"] <= common]
        validated = [point for point in run["validations"] if point["seconds"] <= common]
        reached[run["scheme"]] = {"iterations": len(done), **(validated[-1] if validated else {})}
    return {"seconds": common, "reached": reached}


def largest_difference(runs: Sequence[dict[str, Any]]) -> float:
    """Return the largest relative difference of two runs' training losses at equal iterations."""
    first, second = ([float(point["loss"]) for point in run["iterations"]] for run in runs)
    return max((abs(a - b) / abs(b) for a, b in zip(first, second, strict=False)), default=0.0)
