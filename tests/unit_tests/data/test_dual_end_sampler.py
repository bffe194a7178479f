# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_csbp.data.dual_end_sampler import DualEndSampler
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from tests.unit_tests.data.support import EOD, PAD, VOCAB, Tokenizer, config, documents, stock_datasets, write_indexed
from tests.unit_tests.objectives.support import TOPOLOGIES, layouts_of, single

LENGTH, BLOCK = 64, 4


def assert_equals_stock(dataset: Any, layout: RankRows, count: int | None = None) -> None:
    """Each sample's rows are the stock sample's positions."""
    sampler = DualEndSampler(dataset, LENGTH, VOCAB)
    assert len(sampler) == len(dataset)
    for index in range(len(dataset) if count is None else count):
        for part in getattr(dataset, "datasets", [dataset]):
            # The stock dataset edits the first sample's loss mask after it has cached it.
            part.masks_and_position_ids_are_cached = False
        rows, stock = sampler.read(index, layout), dataset[index]
        np.testing.assert_array_equal(rows.tokens, stock["tokens"].numpy()[layout.positions])
        np.testing.assert_array_equal(rows.next_tokens, stock["labels"].numpy()[layout.positions])
        np.testing.assert_array_equal(rows.next_supervised, stock["loss_mask"].numpy()[layout.positions] > 0)


@pytest.mark.parametrize("scheme, size, assignment", TOPOLOGIES)
def test_rows_equal_the_positions_of_the_stock_sample(
    tmp_path: Path, scheme: Scheme, size: int, assignment: BlockAssignment
) -> None:
    # Documents shorter and longer than a chunk, a sample, and several samples.
    docs = documents(60, 20) + documents(6, 400, seed=1)
    train, _, _ = stock_datasets([60, 4, 4], config(LENGTH, [write_indexed(tmp_path / "a", docs)]))
    for layout in layouts_of(LENGTH, BLOCK, scheme, size, assignment):
        assert_equals_stock(train, layout, count=25)


@pytest.mark.parametrize("weights", [[0.3, 0.7], None])
def test_blends_are_read_as_megatron_blends_them(tmp_path: Path, weights: list[float] | None) -> None:
    prefixes = [write_indexed(tmp_path / name, documents(100, 60, seed)) for seed, name in enumerate("ab")]
    train, valid, _ = stock_datasets([40, 4, 4], config(LENGTH, prefixes, weights))
    for layout in layouts_of(LENGTH, BLOCK, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 2):
        assert_equals_stock(train, layout)
        assert_equals_stock(valid, layout)


@pytest.mark.parametrize(
    "options", [{"eod_mask_loss": True}, {"add_extra_token_to_sequence": False}, {"mmap_bin_files": False}]
)
def test_dataset_options_hold_for_partial_reads(tmp_path: Path, options: dict[str, Any]) -> None:
    prefix = write_indexed(tmp_path / "a", documents(60, 40), np.int32)
    train, _, _ = stock_datasets([20, 2, 2], config(LENGTH, [prefix], **options))
    for layout in layouts_of(LENGTH, BLOCK, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 2):
        assert_equals_stock(train, layout)


def test_the_padding_of_the_last_sample_is_token_zero_and_unsupervised(tmp_path: Path) -> None:
    cfg = config(
        LENGTH, [write_indexed(tmp_path / "a", documents(90, 40))], drop_last_partial_validation_sequence=False
    )
    _, valid, _ = stock_datasets([4, None, 4], cfg)
    padded = int(np.argmax(valid.shuffle_index))
    for layout in layouts_of(LENGTH, BLOCK, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 2):
        assert_equals_stock(valid, layout)
    rows = DualEndSampler(valid, LENGTH, VOCAB).read(padded, single(LENGTH, BLOCK))
    assert 0 < rows.supervised.sum() < rows.supervised.size
    assert not rows.tokens[~rows.supervised].any()


@pytest.mark.parametrize("masked", [True, False])
def test_a_masked_eod_is_never_a_diffusion_target(tmp_path: Path, masked: bool) -> None:
    prefix, layout = write_indexed(tmp_path / "a", documents(60, 40)), single(LENGTH, BLOCK)
    train, _, _ = stock_datasets([20, 2, 2], config(LENGTH, [prefix], eod_mask_loss=masked))
    raw, _, _ = train._query_document_sample_shuffle_indices(3)
    rows = DualEndSampler(train, LENGTH, VOCAB).read(3, layout)
    np.testing.assert_array_equal(rows.supervised, ((raw[:-1] != EOD) | (not masked))[layout.positions])
    assert rows.supervised.all() != masked


@pytest.mark.parametrize("pad", [PAD, EOD, None])
def test_a_token_of_the_data_is_no_padding_even_where_it_is_the_tokenizers_pad_token(
    tmp_path: Path, pad: int | None
) -> None:
    docs = [np.where(np.arange(len(doc)) % 5 == 1, PAD, doc) for doc in documents(90, 40)]
    cfg = config(
        LENGTH,
        [write_indexed(tmp_path / "a", docs)],
        tokenizer=Tokenizer(pad=pad),
        drop_last_partial_validation_sequence=False,
    )
    train, valid, _ = stock_datasets([20, None, 2], cfg)
    whole, partial = single(LENGTH, BLOCK), int(np.argmax(valid.shuffle_index))
    rows = DualEndSampler(train, LENGTH, VOCAB).read(3, whole)
    raw, _, _ = train._query_document_sample_shuffle_indices(3)
    np.testing.assert_array_equal(rows.tokens, raw[whole.positions])
    np.testing.assert_array_equal(rows.next_tokens, raw[whole.positions + 1])
    assert (rows.tokens == PAD).any()
    assert rows.supervised.all()
    assert rows.next_supervised.all()
    # The sample that is cut short: as many supervised tokens as the documents hold behind the earlier samples.
    tokens = sum(len(docs[number]) for number in valid.indices)
    rows = DualEndSampler(valid, LENGTH, VOCAB).read(partial, whole)
    np.testing.assert_array_equal(rows.supervised, whole.positions < tokens % LENGTH)
    np.testing.assert_array_equal(rows.next_supervised, whole.positions < tokens % LENGTH - 1)


def test_only_the_ranges_that_a_rank_owns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _, _ = stock_datasets([10, 1, 1], config(LENGTH, [write_indexed(tmp_path / "a", documents(40, 500))]))
    read: list[int] = []
    source_get = train.dataset.get

    def get(idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        assert length is not None
        read.append(length)
        return source_get(idx, offset=offset, length=length)

    monkeypatch.setattr(train.dataset, "get", get)
    chunk = LENGTH // 8
    for layout in layouts_of(LENGTH, BLOCK, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 4):
        read.clear()
        DualEndSampler(train, LENGTH, VOCAB).read(2, layout)
        # The two chunks of the last rank touch, and so share the one token between them.
        assert sum(read) == (2 * chunk + 1 if layout.rank == 3 else 2 * (chunk + 1))


def test_deferred_indices_are_loaded_at_the_first_read(tmp_path: Path) -> None:
    prefixes = [write_indexed(tmp_path / name, documents(100, 60, seed)) for seed, name in enumerate("ab")]
    options = {"path_to_cache": str(tmp_path / "cache")}
    eager, _, _ = stock_datasets([40, 4, 4], config(LENGTH, prefixes, [0.3, 0.7], **options))
    lazy, _, _ = stock_datasets([40, 4, 4], config(LENGTH, prefixes, [0.3, 0.7], **options, defer_npy_index_mmap=True))
    assert lazy.dataset_index is None
    layout = single(LENGTH, BLOCK)
    for index in range(10):
        one, other = (DualEndSampler(dataset, LENGTH, VOCAB).read(index, layout) for dataset in (eager, lazy))
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_token_outside_the_vocabulary_is_refused_with_what_to_do(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "a", [np.full(500, VOCAB + 7)])
    train, _, _ = stock_datasets([4, 0, 0], config(LENGTH, [prefix], split="1,0,0"))
    message = (
        rf"--data-path {prefix}: sample 2 holds token id 207, but the padded vocabulary has 200 tokens "
        r"\(ids 0 to 199\)\. Train with the tokenizer that the data were prepared with"
    )
    with pytest.raises(ValueError, match=message):
        DualEndSampler(train, LENGTH, VOCAB).read(2, single(LENGTH, BLOCK))


def test_a_dataset_that_cuts_its_own_samples_is_refused(tmp_path: Path) -> None:
    class Reordered(GPTDataset):
        def __getitem__(self, idx: int | None) -> Any:
            return super().__getitem__(idx)

    train, _, _ = stock_datasets(
        [4, 0, 0], config(LENGTH, [write_indexed(tmp_path / "a", documents(9, 90))], split="1,0,0")
    )
    train.__class__ = Reordered
    with pytest.raises(ValueError, match=r"Reordered makes its own samples.*without --fim-data and --sft"):
        DualEndSampler(train, LENGTH, VOCAB)


def test_a_dataset_of_another_length_is_refused(tmp_path: Path) -> None:
    train, _, _ = stock_datasets(
        [4, 0, 0], config(32, [write_indexed(tmp_path / "a", documents(9, 90))], split="1,0,0")
    )
    with pytest.raises(ValueError, match="32 tokens a sample, but --seq-length is 64"):
        DualEndSampler(train, LENGTH, VOCAB)


def test_masking_eod_without_an_eod_token_is_refused(tmp_path: Path) -> None:
    cfg = config(
        LENGTH,
        [write_indexed(tmp_path / "a", documents(9, 90))],
        split="1,0,0",
        eod_mask_loss=True,
        tokenizer=Tokenizer(eod=None),
    )
    train, _, _ = stock_datasets([4, 0, 0], cfg)
    with pytest.raises(ValueError, match="--eod-mask-loss needs an end-of-document token"):
        DualEndSampler(train, LENGTH, VOCAB)
