# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron_csbp.data.datasets import BlockDiffusionDataset
from megatron_csbp.data.packed_dataset import LOSS_SUFFIX, PackedDataset, PackedDatasetConfig
from megatron_csbp.data.packing import fill_of
from megatron_csbp.objectives import ObjectiveConfig, build_objective
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme, Sharding
from tests.unit_tests.data.support import VOCAB, Tokenizer, write_indexed

LENGTH, BLOCK, MASK = 64, 8, 190
SHARDING = Sharding(2, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
OBJECTIVES = ("block-diffusion", "nemotron", "fast-dllm-v2")


def texts(count: int = 40, longest: int = 50) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 150, generator.integers(2, longest)) for _ in range(count)]


def answers(docs: list[np.ndarray]) -> list[np.ndarray]:
    """Mark the last fifth of every second document."""
    return [(np.arange(len(doc)) >= 0.8 * len(doc)) & (number % 2 == 0) for number, doc in enumerate(docs)]


def packed(folder: Path, docs: list[np.ndarray], marked: bool = True, samples: int | None = 20, **options: Any) -> Any:
    prefix = write_indexed(folder / "d", docs)
    if marked:
        write_indexed(Path(f"{prefix}{LOSS_SUFFIX}"), [marks.astype(np.uint8) for marks in answers(docs)], np.uint8)
    return built(folder, samples, **options)


def built(folder: Path, samples: int | None, **options: Any) -> Any:
    settings = PackedDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(folder / "d")], None),
        split="1,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        diffusion_block_size=BLOCK,
        **options,
    )
    sizes = [samples, 0, 0]
    return BlendedMegatronDatasetBuilder(PackedDataset, sizes, lambda: True, settings).build()[Split.train.value]


def wrapped(dataset: Any, rank: int = 0, sharding: Sharding = SHARDING, name: str = "nemotron", **options: Any) -> Any:
    objective = build_objective(ObjectiveConfig(name=name, mask_token_id=MASK))
    plans: LayerPlans = layer_plans(Sample(LENGTH, BLOCK, objective.default_num_views), sharding, rank)
    return BlockDiffusionDataset(dataset, plans, objective, seed=1, padded_vocab_size=VOCAB, **options)


def test_a_sample_is_whole_documents_at_block_boundaries(tmp_path: Path) -> None:
    docs = texts()
    dataset = packed(tmp_path, docs)
    for index in range(len(dataset)):
        sample = dataset[index]
        for number, (start, stop) in zip(sample["documents"], sample["places"], strict=True):
            assert start % BLOCK == 0
            assert np.array_equal(dataset.tokens(number, 0, stop - start), docs[dataset.indices[number]])


def test_clean_rows_are_the_documents_with_positions_that_restart(tmp_path: Path) -> None:
    docs = texts()
    dataset = packed(tmp_path, docs)
    items = [wrapped(dataset, rank)[5] for rank in range(2)]
    tokens = np.full(LENGTH, -1)
    positions = np.full(LENGTH, -1)
    for item in items:
        rows = item["plans"].rows
        clean = rows.copies == CLEAN
        tokens[rows.sample_positions[clean]] = item["tokens"].numpy()[clean]
        positions[rows.sample_positions[clean]] = item["position_ids"].numpy()[clean]
    sample = dataset[5]
    for number, (start, stop) in zip(sample["documents"], sample["places"], strict=True):
        assert np.array_equal(tokens[start:stop], docs[dataset.indices[number]])
        assert np.array_equal(positions[start:stop], np.arange(stop - start))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_only_blocks_with_loss_have_corrupted_rows_and_no_loss_is_lost(tmp_path: Path, name: str) -> None:
    dataset = packed(tmp_path, texts())
    for index in range(8):
        few = [wrapped(dataset, rank, name=name)[index] for rank in range(2)]
        whole = [wrapped(dataset, rank, name=name, all_blocks=True)[index] for rank in range(2)]
        assert losses(few) == losses(whole)
        for key in ("num_tokens", "num_supervised"):
            assert sum(int(item[key]) for item in few) == sum(int(item[key]) for item in whole)
        for item in few:
            rows = item["plans"].rows
            carries = set(
                zip(
                    rows.copies[item["loss_weights"].numpy() != 0].tolist(),
                    (rows.sample_positions[item["loss_weights"].numpy() != 0] // BLOCK).tolist(),
                    strict=True,
                )
            )
            held = {
                (span.copy, block)
                for span in rows.spans
                if span.copy != CLEAN
                for block in range(span.start // BLOCK, span.stop // BLOCK)
            }
            assert held <= carries
        counts = [item["plans"].rows.num_corrupted_rows // BLOCK for item in few]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("sharding", [Sharding(), SHARDING], ids=["one rank", "csbp2"])
def test_nemotron_with_answers_only_is_its_formula_document_by_document(tmp_path: Path, sharding: Sharding) -> None:
    """Diffusion on answers, and next tokens that are answers: nothing else carries loss or is counted."""
    docs = texts()
    dataset, marked = packed(tmp_path, docs), answers(docs)
    carried = 0
    for index in range(8):
        items = [wrapped(dataset, rank, sharding) for rank in range(sharding.group_size)]
        (noise,), sample = items[0].noises(index), dataset[index]
        chance = (1 - 1e-3) * noise.sequence_level() + 1e-3
        draws = noise.uniforms(0, LENGTH)
        expected, supervised = {}, 0
        for number, (start, stop) in zip(sample["documents"], sample["places"], strict=True):
            text, marks = docs[dataset.indices[number]], marked[dataset.indices[number]]
            supervised += int(marks.sum())
            for place, position in enumerate(range(start, stop)):
                if marks[place] and draws[position] < chance:
                    expected[0, position] = (MASK, int(text[place]), float(np.float32(0.3 / chance)))
                if position + 1 < stop and marks[place + 1]:
                    expected[CLEAN, position] = (int(text[place]), int(text[place + 1]), 1.0)
        found = [item[index] for item in items]
        assert losses(found) == expected
        assert sum(int(item["num_tokens"]) for item in found) == len(expected)
        assert sum(int(item["num_supervised"]) for item in found) == supervised
        carried += len(expected)
    assert carried > 40


def losses(items: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[int, int, float]]:
    """Return input, target and weight of every row with loss, by copy and position."""
    found = {}
    for item in items:
        rows = item["plans"].rows
        for row in np.flatnonzero(item["loss_weights"].numpy()):
            key = (int(rows.copies[row]), int(rows.sample_positions[row]))
            found[key] = (int(item["tokens"][row]), int(item["labels"][row]), float(item["loss_weights"][row]))
    return found


def test_only_marked_tokens_are_predicted_unless_all_are_asked_for(tmp_path: Path) -> None:
    docs = texts()
    dataset = packed(tmp_path, docs)
    marked = answers(docs)
    for index in range(6):
        sample = dataset[index]
        expected = np.zeros(LENGTH, dtype=bool)
        for number, (start, stop) in zip(sample["documents"], sample["places"], strict=True):
            expected[start:stop] = marked[dataset.indices[number]]
        assert np.array_equal(wrapped(dataset).sampler.supervised(index), expected)
    everything = packed(tmp_path, docs, loss_on="all")
    sample = everything[0]
    supervised = wrapped(everything).sampler.supervised(0)
    assert supervised.sum() == sum(stop - start for start, stop in sample["places"])


def test_without_marks_every_token_is_predicted(tmp_path: Path) -> None:
    dataset = packed(tmp_path, texts(), marked=False)
    assert wrapped(dataset).sampler.supervised(0).sum() == sum(stop - start for start, stop in dataset[0]["places"])


def test_the_first_token_of_a_document_is_nobodys_next_token(tmp_path: Path) -> None:
    dataset = packed(tmp_path, texts(), marked=False)
    item = wrapped(dataset, sharding=Sharding())[2]
    rows = item["plans"].rows
    last = {int(stop) - 1 for _, stop in dataset[2]["places"]}
    asked = (rows.copies == CLEAN) & (item["loss_weights"].numpy() > 0)
    assert asked.any()
    assert not last & set(rows.sample_positions[asked].tolist())


def test_epochs_are_packed_anew_and_the_same_everywhere(tmp_path: Path) -> None:
    docs = texts()
    one, other = (packed(tmp_path, docs, samples=60) for _ in range(2))
    assert np.array_equal(one.packing.documents, other.packing.documents)
    assert len(one) >= 60
    per_epoch = len(packed(tmp_path, docs, samples=None))
    first = one.packing.documents[: one.packing.offsets[per_epoch]]
    assert sorted(first.tolist()) == list(range(len(docs)))
    fill = fill_of(one.packing, one.lengths, LENGTH, BLOCK)
    assert (fill.samples, fill.blocks >= fill.tokens > 0.5) == (len(one), True)


def test_long_documents_are_refused_by_name_or_cut(tmp_path: Path) -> None:
    docs = [*texts(4), np.arange(LENGTH + 9) % 150]
    with pytest.raises(ValueError, match=r"1 of 5 documents .* document 4, has 73 tokens.*--long-documents cut"):
        packed(tmp_path, docs)
    dataset = packed(tmp_path, docs, long_documents="cut")
    assert dataset.lengths.max() == LENGTH


def test_marks_of_other_documents_are_refused(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "d", texts())
    write_indexed(Path(f"{prefix}{LOSS_SUFFIX}"), [np.ones(3)], np.uint8)
    with pytest.raises(ValueError, match=r"d\.loss\.idx marks other documents"):
        built(tmp_path, 4)
