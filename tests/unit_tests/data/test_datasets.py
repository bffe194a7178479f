# SPDX-License-Identifier: Apache-2.0
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split
from megatron.training.datasets import data_samplers
from torch import Tensor

from megatron_csbp.data.datasets import EVALUATION_SEED, BlockDiffusionDataset, build_train_valid_test_datasets
from megatron_csbp.objectives import ObjectiveConfig, build_objective
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme
from tests.unit_tests.data.support import VOCAB, config, documents, megatron_args, stock_datasets, write_indexed
from tests.unit_tests.objectives.support import SPREAD_SCHEMES, layouts_of, reassembled, single

LENGTH, BLOCK, MASK, SAMPLES = 32, 4, 63, 24
OBJECTIVE = build_objective(ObjectiveConfig(name="block-diffusion", mask_token_id=MASK))
Batches = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    docs = [doc % 60 for doc in documents(80, 60)]
    return write_indexed(tmp_path_factory.mktemp("data") / "a", docs)


def wrapped(prefix: str, layout: RankRows | None = None, split: str = "train", seed: int = 1234) -> Any:
    splits = stock_datasets([SAMPLES, SAMPLES, 0], config(LENGTH, [prefix], split="1,1,0"))
    dataset = splits[Split[split].value]
    return BlockDiffusionDataset(
        dataset, LayerPlans(layout or single(LENGTH, BLOCK)), OBJECTIVE, seed=seed, padded_vocab_size=VOCAB
    )


def stock_loader(
    monkeypatch: pytest.MonkeyPatch, dataset: Any, consumed: int = 0, rank: int = 0, **changes: Any
) -> Any:
    """Megatron's own loader, for one of two data-parallel ranks."""
    monkeypatch.setattr(data_samplers, "get_args", lambda: megatron_args(**changes))
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_rank", lambda: rank)
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_world_size", lambda: 2)
    return data_samplers.build_pretraining_data_loader(dataset, consumed)


def assert_same(one: Batches, other: Batches) -> None:
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        for key in left:
            assert torch.equal(left[key], right[key]), key


def test_an_item_holds_what_the_forward_step_moves(prefix: str) -> None:
    item = wrapped(prefix)[3]
    shapes = {key: (tuple(value.shape), value.dtype) for key, value in item.items()}
    rows = ((2 * LENGTH,), torch.int64)
    assert shapes == {
        "tokens": rows,
        "position_ids": rows,
        "labels": rows,
        "loss_weights": ((2 * LENGTH,), torch.float32),
        "num_tokens": ((), torch.int64),
        "num_supervised": ((), torch.int64),
    }
    np.testing.assert_array_equal(item["position_ids"], single(LENGTH, BLOCK).positions)


@pytest.mark.parametrize("scheme", SPREAD_SCHEMES)
def test_the_global_batch_is_the_same_whatever_the_topology(
    prefix: str, monkeypatch: pytest.MonkeyPatch, scheme: Scheme
) -> None:
    whole = list(stock_loader(monkeypatch, wrapped(prefix), rank=1))
    for size in (2, 4):
        layouts = layouts_of(LENGTH, BLOCK, scheme, size)
        ranks = [list(stock_loader(monkeypatch, wrapped(prefix, layout), rank=1)) for layout in layouts]
        for number, expected in enumerate(whole):
            for key, copy in itertools.product(("tokens", "labels", "loss_weights"), (0, CLEAN)):
                parts = [rank[number][key].numpy().T for rank in ranks]
                one = reassembled([single(LENGTH, BLOCK)], [expected[key].numpy().T[:, 0]], copy)
                np.testing.assert_array_equal(reassembled(layouts, [part[:, 0] for part in parts], copy), one)
            for key in ("num_tokens", "num_supervised"):
                assert torch.equal(sum(rank[number][key] for rank in ranks), expected[key])


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_a_resumed_loader_continues_where_the_first_stopped(
    prefix: str, monkeypatch: pytest.MonkeyPatch, dataloader_type: str
) -> None:
    whole = list(stock_loader(monkeypatch, wrapped(prefix), dataloader_type=dataloader_type))
    resumed = list(stock_loader(monkeypatch, wrapped(prefix), consumed=3 * 4, dataloader_type=dataloader_type))
    assert_same(resumed, whole[3:])


def test_data_parallel_ranks_share_the_samples_of_a_batch(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = wrapped(prefix)
    ranks = [next(iter(stock_loader(monkeypatch, dataset, rank=rank))) for rank in (0, 1)]
    expected = torch.stack([dataset[index]["tokens"] for index in range(4)])
    assert torch.equal(torch.cat([rank["tokens"] for rank in ranks]), expected)


def test_data_workers_make_the_same_batches_and_see_each_epoch(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: dict[int, list[Batches]] = {}
    for workers in (0, 2):
        loader = stock_loader(monkeypatch, wrapped(prefix), dataloader_type="cyclic", num_workers=workers)
        epochs[workers] = [list(loader), list(loader)]
    for in_process, in_workers in zip(epochs[0], epochs[2], strict=True):
        assert_same(in_process, in_workers)
    first, second = (corruption_by_text(batches) for batches in epochs[2])
    common = first.keys() & second.keys()
    assert len(common) >= 4
    assert all(first[text] != second[text] for text in common)


def corruption_by_text(batches: Batches) -> dict[bytes, bytes]:
    """Clean text of each sample -> its corrupted text."""
    layout, pairs = single(LENGTH, BLOCK), {}
    for batch in batches:
        for tokens in batch["tokens"].numpy():
            pairs[tokens[~layout.is_corrupted].tobytes()] = tokens[layout.is_corrupted].tobytes()
    return pairs


def test_an_epoch_resumed_in_the_middle_has_that_epochs_noise(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = stock_loader(monkeypatch, wrapped(prefix), dataloader_type="cyclic")
    first = list(loader)
    second = list(loader)
    consumed = 4 * (len(first) + 1)
    resumed = stock_loader(monkeypatch, wrapped(prefix), consumed=consumed, dataloader_type="cyclic")
    assert_same(list(resumed), second[1:])


def test_training_noise_follows_the_seed_and_evaluation_noise_is_fixed(prefix: str) -> None:
    train, other = wrapped(prefix, seed=1), wrapped(prefix, seed=2)
    assert not torch.equal(train[0]["tokens"], other[0]["tokens"])
    valid, same = wrapped(prefix, split="valid", seed=1), wrapped(prefix, split="valid", seed=2)
    same.set_epoch(5)
    assert torch.equal(valid[0]["tokens"], same[0]["tokens"])
    assert valid.noises(0)[0].seed == EVALUATION_SEED
    assert valid.noises(0)[0].split != train.noises(0)[0].split


def test_reading_a_sample_leaves_the_global_generators_alone(prefix: str) -> None:
    dataset = wrapped(prefix)
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    dataset[0]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_evaluation_gets_its_own_batch_sizes(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"eval_micro_batch_size": 1, "eval_global_batch_size": 2}
    for split, expected in (("train", 2), ("valid", 1)):
        batch = next(iter(stock_loader(monkeypatch, wrapped(prefix, split=split), **sizes)))
        assert batch["tokens"].shape[0] == expected


def test_a_sample_that_fills_a_batch_counts_for_nothing(prefix: str) -> None:
    dataset = wrapped(prefix, split="valid")
    item, filler = dataset[0], dataset[None]
    assert item["num_tokens"] == LENGTH
    assert not any(filler[key].any() for key in ("loss_weights", "num_tokens", "num_supervised"))
    assert {key: value.shape for key, value in filler.items()} == {key: value.shape for key, value in item.items()}
    assert torch.equal(filler["labels"], item["labels"])


def built(layout: RankRows | None = None, sizes: tuple[int | None, ...] = (8, 4, 4), **changes: Any) -> Any:
    return build_train_valid_test_datasets(
        megatron_args(**changes), sizes, LayerPlans(layout or single(LENGTH, BLOCK)), OBJECTIVE, is_built=lambda: True
    )


def first_items(datasets: Any) -> Iterator[dict[str, Tensor]]:
    for dataset in datasets:
        assert isinstance(dataset, BlockDiffusionDataset)
        yield dataset[len(dataset) - 1]


def test_mock_data_give_three_datasets() -> None:
    # Long samples, since Megatron indexes all of its 200 million mock tokens.
    datasets = built(single(1 << 20, BLOCK), mock_data=True, clean_seq_length=1 << 20)
    assert [dataset.split for dataset in datasets] == list(Split)
    assert all(item["num_tokens"] == 1 << 20 for item in first_items(datasets))


def test_one_prefix_is_cut_by_the_split(prefix: str) -> None:
    datasets = built(data_path=[prefix])
    assert [dataset.split for dataset in datasets] == list(Split)
    assert all(item["num_supervised"] == LENGTH for item in first_items(datasets))
    assert built(data_path=[prefix], split="1,0,0")[1:] == (None, None)


def test_blends_and_paths_for_each_split_are_stock(prefix: str, tmp_path: Path) -> None:
    blend = ["0.3", prefix, "0.7", prefix]
    assert all(item["num_tokens"] == LENGTH for item in first_items(built(data_path=blend)))
    paths = {"train_data_path": blend, "valid_data_path": [prefix], "split": None}
    train, valid, test = built(**paths)
    assert (train.split, valid.split, test) == (Split.train, Split.valid, None)
    listed = tmp_path / "paths.json"
    listed.write_text(json.dumps({"train": blend, "valid": [prefix], "test": None}))
    assert torch.equal(built(per_split_data_args_path=str(listed), split=None)[0][5]["tokens"], train[5]["tokens"])


def test_several_validation_sets_are_wrapped_one_by_one(prefix: str) -> None:
    _, valid, _ = built(
        sizes=(4, None, None),
        train_data_path=[prefix],
        valid_data_path=[prefix, prefix],
        split=None,
        multiple_validation_sets=True,
        full_validation=True,
    )
    assert [type(dataset) for dataset in valid] == [BlockDiffusionDataset] * 2


def test_a_rank_that_reads_no_data_gets_none(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotBuilt:
        def __init__(self, *args: Any) -> None:
            pass

        def build(self) -> list[None]:
            return [None, None, None]

    monkeypatch.setattr("megatron_csbp.data.datasets.BlendedMegatronDatasetBuilder", NotBuilt)
    assert built(data_path=[prefix]) == (None, None, None)
