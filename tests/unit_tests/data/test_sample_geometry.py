# SPDX-License-Identifier: Apache-2.0
"""Samples with several views, and samples with documents and active blocks of their own."""

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megatron_csbp.data.datasets import BlockDiffusionDataset
from megatron_csbp.objectives import Objective, ObjectiveConfig, build_objective
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, layer_plans
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample, active_from_blocks, packed_documents
from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from tests.unit_tests.data.support import VOCAB, config, documents, stock_datasets, write_indexed
from tests.unit_tests.objectives.support import single

LENGTH, BLOCK, MASK_ID = 32, 4, 63
BLOCKS = LENGTH // BLOCK
SHARDING = Sharding(2, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
KEYS = ((Mask(CleanAttention.TOKEN_CAUSAL), True), (Mask(CleanAttention.TOKEN_CAUSAL, 5), True))
DOCUMENTS = (6, 1, 9)
"""Positions 0 to 5, 8, 12 to 20; the rest is padding: 6 and 7, 9 to 11, and 21 to 31."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    prefix = write_indexed(tmp_path_factory.mktemp("data") / "a", [doc % 60 for doc in documents(80, 60)])
    return stock_datasets([12, 0, 0], config(LENGTH, [prefix], split="1,0,0"))[0]


def objective(name: str = "nemotron") -> Objective:
    return build_objective(ObjectiveConfig(name=name, mask_token_id=MASK_ID))


def wrapped(stock: Any, rows: RankRows, name: str = "nemotron", **options: Any) -> BlockDiffusionDataset:
    return BlockDiffusionDataset(stock, LayerPlans(rows), objective(name), seed=7, padded_vocab_size=VOCAB, **options)


def packed(index: int, num_views: int = 1) -> Sample:
    """Return the documents with all blocks active, or other documents in every second sample."""
    lengths = DOCUMENTS if index % 2 == 0 else (LENGTH,)
    return Sample(LENGTH, BLOCK, num_views, packed_documents(lengths, BLOCK))


def few_active(index: int) -> Sample:
    """Return a sample with a number of active blocks of its own."""
    return Sample(LENGTH, BLOCK, active=active_from_blocks([range(index % 3 + 1)], BLOCKS))


def rows_of(dataset: BlockDiffusionDataset, index: int) -> tuple[RankRows, dict[str, np.ndarray]]:
    item = dataset[index]
    plans = item.pop("plans", None)
    rows = dataset.plans(index).rows if plans is None else plans.rows
    return rows, {name: np.asarray(value) for name, value in item.items()}


@pytest.mark.parametrize("name", ["nemotron", "block-diffusion"])
def test_the_first_of_several_views_is_the_only_one_of_a_run_without_views(name: str, stock: Any) -> None:
    for index in range(4):
        one, alone = rows_of(wrapped(stock, single(LENGTH, BLOCK), name), index)
        three, together = rows_of(wrapped(stock, single(LENGTH, BLOCK, views=3), name), index)
        for key in ("tokens", "labels", "loss_weights", "position_ids"):
            for copy in (0, CLEAN):
                np.testing.assert_array_equal(together[key][three.copies == copy], alone[key][one.copies == copy])
        assert together["num_supervised"] == 3 * alone["num_supervised"]


@pytest.mark.parametrize("name", ["nemotron", "block-diffusion"])
def test_every_view_of_every_epoch_is_masked_in_its_own_way(name: str, stock: Any) -> None:
    dataset, masks = wrapped(stock, single(LENGTH, BLOCK, views=3), name), set()
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for index in range(4):
            rows, item = rows_of(dataset, index)
            masks |= {(index, item["tokens"][rows.copies == view].tobytes()) for view in range(3)}
    assert len(masks) == 4 * 9


def test_positions_restart_with_each_document(stock: Any) -> None:
    rows, item = rows_of(wrapped(stock, single(LENGTH, BLOCK), sample_of=packed), 0)
    for copy in (0, CLEAN):
        places = np.full(LENGTH, -1)
        places[rows.sample_positions[rows.copies == copy]] = item["position_ids"][rows.copies == copy]
        assert places[[*range(6), 8, *range(12, 21)]].tolist() == [*range(6), 0, *range(9)]


def test_a_documents_last_token_is_not_asked_for_the_next_documents_first(stock: Any) -> None:
    rows, item = rows_of(wrapped(stock, single(LENGTH, BLOCK), sample_of=packed), 0)
    clean = rows.copies == CLEAN
    asked = rows.sample_positions[clean & (item["loss_weights"] > 0)].tolist()
    assert asked == [*range(5), *range(12, 20)]
    _, whole = rows_of(wrapped(stock, single(LENGTH, BLOCK), sample_of=packed), 1)
    assert (whole["loss_weights"][rows_of(wrapped(stock, single(LENGTH, BLOCK)), 1)[0].copies == CLEAN] > 0).all()


@pytest.mark.parametrize("name", ["nemotron", "block-diffusion"])
def test_padding_is_neither_masked_nor_counted(name: str, stock: Any) -> None:
    dataset = wrapped(stock, single(LENGTH, BLOCK), name, sample_of=packed)
    for index in (0, 2, 4, 6):
        rows, item = rows_of(dataset, index)
        corrupted = rows.copies == 0
        assert item["num_supervised"] == sum(DOCUMENTS)
        carries = rows.sample_positions[corrupted & (item["loss_weights"] > 0)]
        assert np.isin(carries, [*range(6), 8, *range(12, 21)]).all()
        # Blocks that lie in padding have no corrupted rows at all.
        assert sorted(set(rows.sample_positions[corrupted] // BLOCK)) == [0, 1, 2, 3, 4, 5]


def test_ranks_share_the_rows_of_a_sample_with_documents(stock: Any) -> None:
    whole = wrapped(stock, single(LENGTH, BLOCK), sample_of=packed)
    ranks = [wrapped(stock, layer_plans(Sample(LENGTH, BLOCK), SHARDING, r).rows, sample_of=packed) for r in (0, 1)]
    for index in range(2):
        expected = whole[index]
        parts = [rank[index] for rank in ranks]
        for key in ("num_tokens", "num_supervised"):
            assert sum(int(part[key]) for part in parts) == expected[key]
        assert sum(float(part["loss_weights"].sum()) for part in parts) == pytest.approx(
            float(expected["loss_weights"].sum()), rel=1e-6
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_brings_the_plans_that_its_layers_ask_for(
    workers: int, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = layer_plans(Sample(LENGTH, BLOCK), SHARDING, 1)
    dataset = BlockDiffusionDataset(
        stock, own, objective(), seed=7, padded_vocab_size=VOCAB, sample_of=few_active, plan_keys=KEYS
    )
    batches = list(DataLoader(dataset, batch_size=1, num_workers=workers))

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("planned on the training thread")

    monkeypatch.setattr("megatron_csbp.transformer.geometry.layer_plans.plan_attention", refuse)
    assert len(batches) == len(dataset)
    for index, batch in enumerate(batches):
        plans = batch["plans"]
        assert plans.rows.sample.key == few_active(index).key
        assert batch["tokens"].shape == (1, plans.rows.num_rows)
        for mask, clean_queries in KEYS:
            assert plans.plan(mask, clean_queries=clean_queries).rows.num_rows == plans.rows.num_rows
    assert len({batch["plans"].rows.num_rows for batch in batches}) > 1


def test_two_samples_of_their_own_geometry_are_no_micro_batch(stock: Any) -> None:
    dataset = wrapped(stock, single(LENGTH, BLOCK), sample_of=lambda index: packed(0))
    with pytest.raises(ValueError, match=r"--micro-batch-size 2: .* Use --micro-batch-size 1"):
        next(iter(DataLoader(dataset, batch_size=2)))


@pytest.mark.parametrize(
    "sample", [Sample(64, BLOCK), Sample(LENGTH, 8), Sample(LENGTH, BLOCK, 2)], ids=["length", "block", "views"]
)
def test_a_sample_of_other_sizes_than_the_flags_is_refused(sample: Sample, stock: Any) -> None:
    dataset = wrapped(stock, single(LENGTH, BLOCK), sample_of=lambda index: sample)
    with pytest.raises(
        ValueError, match=r"sample 3 has .* --seq-length, --diffusion-block-size and --corrupted-views"
    ):
        dataset[3]


def test_a_sample_that_fills_a_batch_has_the_plans_of_the_one_it_repeats(stock: Any) -> None:
    dataset = wrapped(stock, single(LENGTH, BLOCK), sample_of=packed)
    filler = dataset[None]
    assert filler["plans"] is dataset[0]["plans"]
    assert not any(filler[key].any() for key in ("loss_weights", "num_tokens", "num_supervised"))
