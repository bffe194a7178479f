# SPDX-License-Identifier: Apache-2.0
"""Megatron makes the cached indices here; then the data change under their prefix."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_csbp.data.validation import validate_data_files
from tests.unit_tests.data.support import config, documents, megatron_args, stock_datasets, write_indexed

LENGTH = 32
SHARED = {"split": "8,1,1"}


def written(folder: Path, count: int = 80, seed: int = 0, longest: int = 60) -> str:
    return write_indexed(folder / "a", [doc % 60 for doc in documents(count, longest, seed)])


def cached(prefix: str, folder: Path, samples: int = 60, length: int = LENGTH, **options: Any) -> None:
    stock_datasets([samples, 4, 4], config(length, [prefix], path_to_cache=str(folder), **options))


def validate(prefix: str, folder: Path, **changes: Any) -> None:
    given = {"data_path": [prefix], "data_cache_path": str(folder), "clean_seq_length": LENGTH}
    validate_data_files(megatron_args(**{**given, **SHARED, **changes}))


@pytest.mark.parametrize("samples", [1, 60, 400], ids=["part of an epoch", "an epoch", "several epochs"])
def test_indices_of_the_same_data_pass(tmp_path: Path, samples: int) -> None:
    prefix = written(tmp_path)
    cached(prefix, tmp_path / "cache", samples)
    validate(prefix, tmp_path / "cache")


def test_indices_of_a_split_with_paths_of_its_own_pass_and_are_refused_when_stale(tmp_path: Path) -> None:
    prefix, cache = written(tmp_path), tmp_path / "cache"
    own = {"blend": None, "blend_per_split": [([prefix], None), ([prefix], None), None], "split": None}
    stock_datasets([60, None, 0], config(LENGTH, [], path_to_cache=str(cache), **own))
    flags = {"data_path": None, "train_data_path": [prefix], "valid_data_path": [prefix], "split": None}
    validate(prefix, cache, **flags)
    written(tmp_path, seed=1)
    with pytest.raises(ValueError, match=f"--train-data-path {prefix}: the cached sample index"):
        validate(prefix, cache, **flags)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seed": 1}, "cuts samples of older data, whose documents had other lengths"),
        ({"longest": 90}, "cuts samples of older data, whose documents had other lengths"),
        (
            {"count": 120},
            r"deals documents \d+ to \d+ of older data under this prefix, and the \w+ split now has documents",
        ),
        (
            {"count": 40},
            r"deals documents \d+ to \d+ of older data under this prefix, and the \w+ split now has documents",
        ),
    ],
    ids=["other documents", "longer documents", "more documents", "fewer documents"],
)
@pytest.mark.parametrize("place", ["--data-cache-path", "beside the data"])
def test_indices_of_data_that_were_prepared_again_are_refused(
    tmp_path: Path, change: dict[str, int], said: str, place: str
) -> None:
    prefix = written(tmp_path)
    folder = tmp_path / "cache" if place.startswith("--") else Path(prefix, "cache", "GPTDataset_indices")
    cached(prefix, folder)
    written(tmp_path, **change)
    given = {} if place.startswith("--") else {"data_cache_path": None}
    with pytest.raises(ValueError, match=rf"--data-path {prefix}: the cached sample index .* {said}") as error:
        validate(prefix, folder, **given)
    assert str(error.value).endswith(
        f"Remove the folder {folder}, from which all indices are then made anew, or give another --data-cache-path."
    )


def test_indices_of_other_runs_are_nobodys_business(tmp_path: Path) -> None:
    prefix, cache = written(tmp_path), tmp_path / "cache"
    cached(prefix, cache, random_seed=5)
    cached(prefix, cache, length=16)
    (cache / "x-GPTDataset-train-description.txt").write_text('{"dataset_path": "other"}')
    written(tmp_path, seed=1)
    with pytest.raises(ValueError, match="cannot be read"):
        validate(prefix, cache)
    (cache / "x-GPTDataset-train-description.txt").unlink()
    validate(prefix, cache)


@pytest.mark.parametrize("name", ["sample_index", "document_index", "shuffle_index"])
def test_a_truncated_index_is_refused_and_a_missing_one_is_made_anew(tmp_path: Path, name: str) -> None:
    prefix, cache = written(tmp_path), tmp_path / "cache"
    cached(prefix, cache)
    (path,) = cache.glob(f"*train-{name}.npy")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"cannot be read .*Remove the folder"):
        validate(prefix, cache)
    path.unlink()
    validate(prefix, cache)


def test_tokens_of_the_same_documents_lengths_need_no_new_index(tmp_path: Path) -> None:
    prefix, cache = written(tmp_path), tmp_path / "cache"
    cached(prefix, cache)
    write_indexed(tmp_path / "a", [np.zeros(len(doc), dtype=np.int64) for doc in documents(80, 60)])
    validate(prefix, cache)
