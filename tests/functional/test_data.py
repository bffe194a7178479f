# SPDX-License-Identifier: Apache-2.0
"""Training on real text: prepared, blended, read by workers, resumed over epochs, and refused when it is broken."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_csbp.data import prepare
from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, NEMOTRON, PP2, TIED, iterations, words
from tests.support.checkpoint_tensors import load_parameters
from tests.support.megatron_run import Ranks, worst_difference

CURVE_TOLERANCE = 2e-6


@dataclass(frozen=True)
class Corpus:
    """Two prepared datasets and the command line that trains on their blend."""

    first: Path
    second: Path
    flags: list[str]


def without(flags: list[str], *names: str) -> list[str]:
    """Return a command line without these flags and their values."""
    kept, skip = [], False
    for word in flags:
        skip = word in names or (skip and not word.startswith("--"))
        if not skip:
            kept.append(word)
    return kept


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Prepare the sources of two modules of the standard library, with a small tokenizer of their own."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = {name: Path(module.__file__ or "").read_text() for name, module in (("first", json), ("second", prepare))}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=180, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(texts.values(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "tokenizer")
    for name, text in texts.items():
        documents = [text[start : start + 400] for start in range(0, len(text), 400)][:30]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in documents))
        prefix = ["--output-prefix", str(folder / name), "--tokenizer", str(folder / "tokenizer")]
        prepare.main(["--input", str(folder / f"{name}.jsonl"), *prefix])
    flags = [
        *without(TIED, "--mock-data", "--tokenizer-type", "--vocab-size", "--num-workers", "--split"),
        *NEMOTRON,
        *words(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder / 'tokenizer'}"),
        *words(f"--data-cache-path {folder / 'cache'} --eod-mask-loss --split 90,10,0 --num-workers 2"),
    ]
    return Corpus(folder / "first", folder / "second", flags)


def blend(corpus: Corpus) -> list[str]:
    return [*corpus.flags, "--data-path", "0.7", str(corpus.first), "0.3", str(corpus.second)]


def test_blended_text_trains_the_same_on_two_ranks_and_without_workers(corpus: Corpus, ranks: Ranks) -> None:
    flags = [*blend(corpus), *iterations(6, evaluate=True)]
    one = ranks.train(flags).check()
    two = ranks.train([*flags, *CSBP2], 2).check()
    unaided = ranks.train([*flags, "--num-workers", "0"]).check()
    assert len(one.losses()) == 6
    assert unaided.records == one.records
    for name in ("lm loss", "diffusion loss", "ar loss"):
        assert worst_difference(two.losses(name), one.losses(name)) < CURVE_TOLERANCE
    assert worst_difference(two.grad_norms, one.grad_norms) < CURVE_TOLERANCE
    assert worst_difference(two.evaluated("nelbo"), one.evaluated("nelbo")) < CURVE_TOLERANCE


def test_full_validation_reads_every_sample_once_in_every_topology(
    corpus: Corpus, ranks: Ranks, tmp_path: Path
) -> None:
    sets = [str(tmp_path / f"{samples} samples") for samples in (5, 1)]
    for prefix, samples in zip(sets, (5, 1), strict=True):
        tokens = np.random.default_rng(samples).integers(0, 180, 64 * samples + 40)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{prefix}.idx")
    flags = [*without(corpus.flags, "--micro-batch-size", "--global-batch-size", "--lr", "--min-lr", "--split")]
    flags += ["--full-validation", "--multiple-validation-sets", "--train-data-path", str(corpus.first)]
    flags += ["--valid-data-path", *sets]
    flags += words("--lr 0 --min-lr 0 --train-iters 2 --eval-interval 1 --eval-iters 1")
    one_by_one = ranks.train([*flags, *words("--micro-batch-size 1 --global-batch-size 1 --skip-train")]).check()
    expected = one_by_one.evaluated("nelbo")
    assert len(expected) == 2
    batches = words("--micro-batch-size 2 --global-batch-size 4")
    for topology, size in (([], 1), ([], 2), (CSBP2, 4)):
        # Evaluated after each of two iterations, which change no weight, and at the end.
        run = ranks.train([*flags, *batches, *topology], size).check()
        assert worst_difference(run.evaluated("nelbo"), expected * 3) < CURVE_TOLERANCE


def test_a_batch_without_loss_steps_as_megatron_does_with_gradients_of_zero(ranks: Ranks, tmp_path: Path) -> None:
    """Every token ends a document and none is predicted: Adam's first step is 0, and weight decay is not."""
    builder = IndexedDatasetBuilder(f"{tmp_path / 'ends'}.bin", dtype=np.uint16)
    builder.add_document(np.full(1000, 186), [1000])
    builder.finalize(f"{tmp_path / 'ends'}.idx")
    flags = [*without(TIED, "--mock-data", "--split", "--lr-decay-style", "--lr-warmup-iters"), *BLOCK_DIFFUSION]
    flags += ["--data-path", str(tmp_path / "ends"), *words("--split 1,0,0 --eod-mask-loss --lr-decay-style constant")]
    flags += [*words("--weight-decay 0.5 --no-save-optim --no-save-rng"), *iterations(1)]
    ranks.train([*without(flags, "--lr", "--min-lr"), *words("--lr 0 --min-lr 0 --save"), str(tmp_path / "0")]).check()
    run = ranks.train([*flags, "--save", str(tmp_path / "1")]).check()
    assert (run.losses(), run.grad_norms) == ([0.0], [0.0])
    before, after = (load_parameters(tmp_path / name, 1) for name in ("0", "1"))
    decay = 1 - 2e-3 * 0.5
    shrunk = {name: 1.0 if "norm" in name else decay for name in before}  # norms have no weight decay
    assert set(shrunk.values()) == {decay, 1.0}
    for name, factor in shrunk.items():
        torch.testing.assert_close(after[name], before[name] * factor, rtol=1e-6, atol=0)


def test_packed_documents_with_few_answers_train_like_one_rank_with_all_blocks(
    corpus: Corpus, ranks: Ranks, tmp_path: Path
) -> None:
    """Every second document has an answer, its last third: on two ranks only blocks with loss have corrupted rows."""
    prefix = tmp_path / "data"
    for ending in (".bin", ".idx", ".meta.json"):
        Path(f"{prefix}{ending}").write_bytes(Path(f"{corpus.first}{ending}").read_bytes())
    documents = IndexedDataset(str(prefix))  # unmaps its index when it goes
    marks = IndexedDatasetBuilder(f"{prefix}.loss.bin", dtype=np.uint8)
    for number, length in enumerate(documents.sequence_lengths.tolist()):
        answer = (np.arange(length) >= 0.7 * length) & (number % 2 == 0)
        marks.add_document(answer.astype(np.uint8), [length])
    marks.finalize(f"{prefix}.loss.idx")
    flags = [
        *without(corpus.flags, "--eod-mask-loss", "--micro-batch-size", "--seq-length", "--max-position-embeddings")
    ]
    flags += words("--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --pack-documents")
    flags += ["--data-path", str(prefix), *iterations(6, evaluate=True)]
    one = ranks.train([*flags, "--csbp-all-blocks"]).check()
    two = ranks.train([*flags, *CSBP2, "--save", str(tmp_path / "saved"), "--save-interval", "3"], 2).check()
    assert len(one.losses()) == 6
    for name in ("lm loss", "diffusion loss", "ar loss"):
        assert worst_difference(two.losses(name), one.losses(name)) < CURVE_TOLERANCE
    assert worst_difference(two.grad_norms, one.grad_norms) < CURVE_TOLERANCE
    assert worst_difference(two.evaluated("nelbo"), one.evaluated("nelbo")) < CURVE_TOLERANCE
    saved = ["--load", str(tmp_path / "saved"), "--ckpt-step", "3"]
    resumed = [*flags, *CSBP2, *saved]
    assert ranks.train(resumed, 2).check().records == two.records[3:]
    # From the same weights, which Megatron's own initialisation does not give to pipeline stages.
    anew = [*flags, *saved, *words("--finetune --no-load-optim --no-load-rng")]
    whole, piped = ranks.train([*anew, "--csbp-all-blocks"]).check(), ranks.train([*anew, *PP2, *CSBP2], 4).check()
    assert len(piped.losses()) == 6
    assert worst_difference(piped.losses(), whole.losses()) < CURVE_TOLERANCE
    assert worst_difference(piped.grad_norms, whole.grad_norms) < CURVE_TOLERANCE
    refused = ranks.train([*resumed, "--loss-on", "all"], 2, timeout=120)
    assert set(refused.returncodes) == {2}
    assert "--loss-on all differs from answers in the checkpoint" in refused.output


@pytest.mark.parametrize("order", [pytest.param("single", marks=pytest.mark.slow), "cyclic"])
def test_resumes_bit_for_bit_over_epochs(order: str, corpus: Corpus, ranks: Ranks, tmp_path: Path) -> None:
    """Twelve iterations of sixteen samples read the small dataset several times."""
    flags = [*corpus.flags, "--data-path", str(corpus.first), "--dataloader-type", order]
    flags += [*words("--micro-batch-size 16 --global-batch-size 16"), *iterations(12)]
    whole = ranks.train(flags).check()
    ranks.train([*flags, "--exit-interval", "6", "--save", str(tmp_path)]).check()
    rest = ranks.train([*flags, "--load", str(tmp_path)]).check()
    assert whole.losses()[6:] == rest.losses()
    assert whole.grad_norms[6:] == rest.grad_norms
    assert len(rest.losses()) == 6


@pytest.mark.parametrize("fault", ["truncated", "other tokenizer"])
def test_every_rank_refuses_broken_data(fault: str, corpus: Corpus, ranks: Ranks, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    for ending in (".bin", ".idx", ".meta.json"):
        content = Path(f"{corpus.first}{ending}").read_bytes()
        Path(f"{prefix}{ending}").write_bytes(content[:-8] if (fault, ending) == ("truncated", ".bin") else content)
    flags = [*corpus.flags, "--data-path", str(prefix), *iterations(1), *CSBP2]
    if fault == "other tokenizer":
        flags = [*without(flags, "--tokenizer-model"), *words("--tokenizer-type NullTokenizer --vocab-size 95")]
        flags = [*without(flags, "--mask-token-id", "--eod-mask-loss"), "--mask-token-id", "0"]
    run = ranks.train(flags, 2, timeout=120)
    assert run.returncodes == [2, 2], run.tail
    assert run.output.count(f"error: --data-path {prefix}") == 2, run.tail
    assert "Traceback" not in run.output


def test_a_schedule_of_batch_sizes_counts_clean_tokens(ranks: Ranks) -> None:
    flags = without([*TIED, *NEMOTRON, *CSBP2, *iterations(4)], "--global-batch-size")
    # The samples have 64 tokens: the batch grows after 4 samples.
    run = ranks.train([*flags, "--step-batch-size-schedule", "0:2 256:4"], 2).check()
    assert re.findall(r"global batch size: +(\d+)", run.output) == ["2", "2", "4", "4"]
