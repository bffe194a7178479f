# SPDX-License-Identifier: Apache-2.0
"""Contract with the inside of Megatron's datasets: what the sampler touches is there and means what it should."""

from pathlib import Path

import numpy as np

from megatron_csbp.data import gpt_dataset_access as access
from tests.unit_tests.data.support import config, documents, stock_datasets, write_indexed


def test_the_indices_of_a_gpt_dataset_locate_its_samples(tmp_path: Path) -> None:
    dataset, _, _ = stock_datasets([20, 2, 2], config(32, [write_indexed(tmp_path / "a", documents(60, 40))]))
    document_index, sample_index, shuffle_index = access.gpt_dataset_indices(dataset)
    assert sample_index.shape == (len(shuffle_index) + 1, 2)
    assert len(shuffle_index) == len(dataset)
    document, offset = sample_index[shuffle_index[3]]
    text, _, _ = dataset._query_document_sample_shuffle_indices(3)
    assert dataset.dataset.get(int(document_index[document]), int(offset), 1)[0] == text[0]
    assert access.reads_stock_samples(dataset)


def test_the_indices_of_a_blend_locate_its_datasets(tmp_path: Path) -> None:
    prefixes = [write_indexed(tmp_path / name, documents(100, 60, seed)) for seed, name in enumerate("ab")]
    blend, _, _ = stock_datasets([40, 4, 4], config(32, prefixes, [0.3, 0.7]))
    which, index = access.blend_indices(blend)
    part = blend.datasets[which[7]][index[7]]
    np.testing.assert_array_equal(part["tokens"], blend[7]["tokens"])
    assert not access.reads_stock_samples(blend)
