# SPDX-License-Identifier: Apache-2.0
"""What an iteration costs when only answers carry loss, against corrupting every block, and what sharing a copy saves.

The real entry trains on two ranks. The compared runs alternate, so that a busy minute of the machine hits both alike.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).parents[1]
RANKS = 2
VOCABULARY = 256
MASK_TOKEN_ID = 254
END_TOKEN_ID = 255
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 896 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--make-vocab-size-divisible-by 128 --csbp-head-groups 1"
)
TRAINING = (
    "--micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --num-workers 1 --seed 7 --log-interval 1 "
    f"--eval-iters 0 --eval-interval 1000 --diffusion-block-size 32 --mask-token-id {MASK_TOKEN_ID} "
    f"--context-parallel-size {RANKS} --bp-size {RANKS} --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    "--split 1,0,0"
)
WARM_UP = 2
_ITERATION = re.compile(r"iteration +\d+/.*elapsed time per iteration \(ms\): ([\d.]+) ")
CASES = {
    "answers": "--diffusion-objective fast-dllm-v2 --pack-documents --global-batch-size 1",
    "all blocks": "--diffusion-objective fast-dllm-v2 --pack-documents --csbp-all-blocks --global-batch-size 1",
    "two views, one clean copy": "--corrupted-views 2 --loss-on all --pack-documents --global-batch-size 1",
    "two doubled sequences": "--corrupted-views 1 --loss-on all --pack-documents --global-batch-size 2",
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        sequence_length: L.
        documents: conversations of the corpus.
        mean_document: mean length of one, tokens; lengths are log-normal.
        supervised: share of a document's tokens that its answer takes.
        iterations: of each run, `WARM_UP` of them not counted.
        repeats: runs of each case.
    """

    sequence_length: int = 4096
    documents: int = 400
    mean_document: int = 500
    supervised: float = 0.1
    iterations: int = 8
    repeats: int = 2


def write_corpus(prefix: Path, sizes: Sizes) -> dict[str, float]:
    """Write documents of random tokens, whose last tokens are an answer, and the marks of the answers."""
    generator = np.random.default_rng(11)
    tokens = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    marks = IndexedDatasetBuilder(f"{prefix}.loss.bin", dtype=np.uint8)
    total = supervised = 0
    for _ in range(sizes.documents):
        length = int(np.clip(generator.lognormal(np.log(sizes.mean_document) - 0.32, 0.8), 16, sizes.sequence_length))
        answer = np.zeros(length, np.uint8)
        answer[-max(1, round(sizes.supervised * length)) :] = 1
        document = generator.integers(0, MASK_TOKEN_ID, length)
        document[-1] = END_TOKEN_ID
        tokens.add_document(document, [length])
        marks.add_document(answer, [length])
        total, supervised = total + length, supervised + int(answer.sum())
    tokens.finalize(f"{prefix}.idx")
    marks.finalize(f"{prefix}.loss.idx")
    return {"documents": sizes.documents, "tokens": total, "supervised": supervised / total}


def iteration_seconds(case: str, sizes: Sizes, prefix: Path) -> list[float]:
    """Run one case; return the seconds of each iteration after the first ones.

    Raises:
        RuntimeError: the run failed; the message holds the end of its output.
    """
    length = str(sizes.sequence_length)
    flags = [*MODEL.split(), *TRAINING.split(), *CASES[case].split(), "--data-path", str(prefix)]
    flags += ["--seq-length", length, "--max-position-embeddings", length, "--train-iters", str(sizes.iterations)]
    flags += ["--data-cache-path", str(prefix.parent / case.replace(" ", "-").replace(",", ""))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    run = subprocess.run(
        [*launcher, "-m", "megatron_csbp.pretrain_gpt", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = [float(time) / 1000 for time in _ITERATION.findall(run.stdout)]
    if run.returncode or len(seconds) != sizes.iterations:
        raise RuntimeError(f"{case}: exit status {run.returncode}\n" + "\n".join(run.stdout.splitlines()[-30:]))
    return seconds[WARM_UP:]


def measure(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Time every case in turn; return the medians and their ratios."""
    corpus = write_corpus(folder / "chats", sizes)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(sizes.repeats):
        for case in CASES:
            seconds[case] += iteration_seconds(case, sizes, folder / "chats")
    medians = {case: statistics.median(times) for case, times in seconds.items()}
    return {
        "corpus": corpus,
        "sequence_length": sizes.sequence_length,
        "model": MODEL,
        "seconds": medians,
        "answers_to_all_blocks": medians["answers"] / medians["all blocks"],
        "shared_to_doubled": medians["two views, one clean copy"] / medians["two doubled sequences"],
    }


def section(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    seconds, corpus = result["seconds"], result["corpus"]
    shapes: Sequence[str] = [f"{case} {time:.2f} s" for case, time in seconds.items()]
    return [
        f"{corpus['documents']} documents of random tokens, {corpus['tokens'] / corpus['documents']:.0f} tokens in "
        f"the mean, {corpus['supervised']:.0%} of them in answers, packed to L = {result['sequence_length']}; blocks "
        f"of 32, CSBP on {RANKS} ranks of one core each, `{result['model'].split(' --swiglu')[0]}`, vocabulary "
        f"{VOCABULARY}, so that layers and not the vocabulary take the time. Median seconds of an iteration: "
        f"{'; '.join(shapes)}.",
        "",
        f"With corrupted rows for the blocks of the answers only, an iteration takes "
        f"{result['answers_to_all_blocks']:.2f} of the time that it takes with all blocks (`--csbp-all-blocks`; "
        f"target: 0.60). Two views of one clean copy take {result['shared_to_doubled']:.2f} of the time of two "
        "doubled sequences (target: 0.80).",
    ]
