# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_csbp.data import mask_token, validation
from megatron_csbp.data.indexed_files import PreparedMetadata, open_indexed_files
from megatron_csbp.data.validation import validate_data_files
from tests.unit_tests.data.support import Tokenizer, documents, megatron_args, write_indexed


def dataset(folder: Path, name: str = "a", count: int = 40, longest: int = 60, top: int = 64) -> str:
    return write_indexed(folder / name, [doc % top for doc in documents(count, longest)])


def validate(**changes: Any) -> None:
    validate_data_files(megatron_args(**changes))


def refuses(message: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=message):
        validate(**changes)


def sidecar(prefix: str, **changes: Any) -> None:
    files = open_indexed_files(prefix, "--data-path")
    values = {
        "tokenizer": "tok.json",
        "vocab_size": 64,
        "max_token_id": 63,
        "tokens": files.num_tokens,
        "documents": files.num_documents,
        "supervised_tokens": files.num_tokens,
        "answers_found_by": [],
    }
    Path(prefix + ".meta.json").write_text(PreparedMetadata(**(values | changes)).to_json())


def test_good_data_pass_under_every_flag_that_names_them(tmp_path: Path) -> None:
    prefix, listed, per_split = dataset(tmp_path), tmp_path / "list", tmp_path / "per_split.json"
    listed.write_text(f"0.5 {prefix} 0.5 {prefix}")
    per_split.write_text(json.dumps({"train": ["1", prefix], "valid": prefix, "test": None}))
    validate(mock_data=True)
    validate(data_path=[prefix])
    validate(data_path=["0.3", prefix, "0.7", prefix])
    validate(data_args_path=str(listed))
    validate(train_data_path=[prefix], valid_data_path=[prefix], split=None)
    validate(per_split_data_args_path=str(per_split), split=None)


def test_a_mask_token_in_the_training_data_is_refused_with_its_frequency_and_advice(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "a", [np.array([5, 1, 7, 1, 9])] * 20)
    args = megatron_args(data_path=[prefix], mask_token_id=1)
    said = r"^--mask-token-id 1: 40 of the 100 tokens of --data-path .*a have this id \(0.4 of all\), .* Use ADVICE\.$"
    with pytest.raises(ValueError, match=said):
        validate_data_files(args, mask_advice="ADVICE")
    refuses("--mask-token-id 1: 40 of the 100 tokens of --train-data-path", train_data_path=[prefix], mask_token_id=1)
    clean = write_indexed(tmp_path / "b", [np.array([5, 7, 9])] * 20)
    validate(train_data_path=[clean], valid_data_path=[prefix], mask_token_id=1)
    validate(data_path=[prefix], mask_token_id=1, skip_train=True)
    validate(data_path=[prefix], mask_token_id=2)


def test_a_table_of_counts_is_believed_unless_it_is_of_other_data(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "a", [np.array([5, 1, 7, 1, 9])] * 20)
    counts = np.zeros(10, dtype=np.int64)
    counts[[5, 7]] = 50
    np.save(f"{prefix}.counts.npy", counts)
    validate(data_path=[prefix], mask_token_id=1)
    validate(data_path=[prefix], mask_token_id=40)
    refuses("--mask-token-id 7: 50 of the 100 tokens", data_path=[prefix], mask_token_id=7)
    for other in (counts[:6], counts.astype(float), counts[None]):
        np.save(f"{prefix}.counts.npy", other)
        refuses("--mask-token-id 1: 40 of the 100 tokens", data_path=[prefix], mask_token_id=1)
    Path(f"{prefix}.counts.npy").write_bytes(b"no table")
    refuses("--mask-token-id 1: 40 of the 100 tokens", data_path=[prefix], mask_token_id=1)


def test_large_data_that_nobody_counted_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.zeros(1 << 19, dtype=np.uint16)
    tokens[-10:] = 1
    prefix = write_indexed(tmp_path / "a", [tokens])
    monkeypatch.setattr(mask_token, "READ_TOKENS", 1 << 17)
    said = "--mask-token-id 1: 10 of the 131072 tokens read of --data-path"
    refuses(said, data_path=[prefix], mask_token_id=1, split="1,0,0")


@pytest.mark.parametrize(
    "mask, size, is_held", [(5, 200, True), (199, 200, True), (200, 200, False), (0, 9000, False)]
)
def test_mock_data_hold_what_megatron_makes_them_of(mask: int, size: int, is_held: bool) -> None:
    tokenizer, args = Tokenizer(vocab_size=size), megatron_args(mock_data=True, mask_token_id=mask)
    if is_held:
        with pytest.raises(ValueError, match=f"--mask-token-id {mask}: --mock-data, which counts 1, 2, 3, ..., holds"):
            validate_data_files(args, tokenizer)
        args.skip_train = True
    validate_data_files(args, tokenizer)


def test_data_in_object_storage_are_left_to_megatron() -> None:
    validate(data_path=["s3://bucket/a"])
    refuses(
        "--data-path s3://bucket/a: --pack-documents reads files", data_path=["s3://bucket/a"], pack_documents=True
    )


def test_documents_too_long_to_pack_are_named_on_every_rank_before_they_are_read(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "a", [np.zeros(length) for length in (5, 70, 9, 65)])
    packed = {"data_path": [prefix], "pack_documents": True, "split": "100,0,0", "eval_iters": 0}
    refuses(
        "2 of 4 documents are longer than --seq-length 64; .* document 1, has 70 tokens.* --long-documents cut",
        clean_seq_length=64,
        **packed,
    )
    validate(clean_seq_length=64, long_documents="cut", **packed)
    validate(clean_seq_length=70, **packed)


def test_marks_of_other_documents_and_damaged_marks_are_refused(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "a", [np.zeros(5), np.zeros(9)])
    packed = {"data_path": [prefix], "pack_documents": True, "split": "100,0,0", "eval_iters": 0}
    marks = write_indexed(tmp_path / "a.loss", [np.ones(5), np.ones(8)], np.uint8)
    refuses(r"a\.loss\.idx marks other documents than .*a\.idx holds\. Write a mark for each", **packed)
    write_indexed(tmp_path / "a.loss", [np.ones(5), np.ones(9)], np.uint8)
    validate(**packed)
    Path(f"{marks}.bin").unlink()
    refuses(r"a\.loss\.bin", **packed)


def test_no_data_and_two_kinds_of_data_are_refused(tmp_path: Path) -> None:
    refuses("no training data: give --data-path PREFIX .* or --mock-data")
    refuses("--mock-data excludes data paths", mock_data=True, data_path=[dataset(tmp_path)])


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    prefix = dataset(tmp_path)
    Path(prefix + suffix).unlink()
    refuses(rf"--data-path {prefix}: the file {prefix}{suffix} does not exist. Prepare the data", data_path=[prefix])


def test_a_path_with_its_suffix_is_explained(tmp_path: Path) -> None:
    refuses("a.bin.idx does not exist. Give the path without its suffix", data_path=[dataset(tmp_path) + ".bin"])


def test_a_truncated_or_longer_bin_is_refused_with_both_sizes(tmp_path: Path) -> None:
    prefix = dataset(tmp_path)
    data = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(data[:-2])
    tokens = len(data) // 2
    refuses(
        rf"a.bin is truncated: it has {len(data) - 2} bytes, and the index promises {tokens} tokens of 2 bytes = "
        rf"{len(data)}. Copy both files again",
        train_data_path=[prefix],
        split=None,
    )
    Path(prefix + ".bin").write_bytes(data + b"00")
    refuses("a.bin is longer than its index says", data_path=[prefix])


def test_a_truncated_or_foreign_index_is_refused(tmp_path: Path) -> None:
    prefix = dataset(tmp_path)
    index = Path(prefix + ".idx").read_bytes()
    for content, message in [
        (index[:-3], f"a.idx is truncated: {len(index) - 3} bytes of {len(index)} for its 40 documents"),
        (index[:20], "a.idx is not a Megatron index"),
        (b"x" * len(index), "a.idx is not a Megatron index"),
        (index[:17] + b"\x63" + index[18:], "version 1 and dtype code 99; Megatron reads version 1 and codes 1 to 8"),
    ]:
        Path(prefix + ".idx").write_bytes(content)
        refuses(message, data_path=[prefix])


def test_data_without_tokens_are_refused(tmp_path: Path) -> None:
    refuses("the dataset holds no tokens", data_path=[write_indexed(tmp_path / "a", [])])


def test_a_token_beyond_the_vocabulary_is_found_by_reading(tmp_path: Path) -> None:
    prefix = dataset(tmp_path, top=70)
    refuses(
        rf"--data-path {prefix} holds token id 69 \(found by reading it\), but the padded vocabulary has 64 tokens "
        r"\(ids 0 to 63\). Train with the tokenizer",
        data_path=[prefix],
    )
    validate(data_path=[prefix], padded_vocab_size=70)
    validate(data_path=[prefix], padded_vocab_size=None)


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "a", [np.array([1, -3, 2])] * 10, np.int32)
    refuses("holds token id -3", data_path=[prefix])


def test_large_data_are_read_in_evenly_spaced_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.zeros(1 << 20, dtype=np.uint16)
    prefix = write_indexed(tmp_path / "a", np.split(tokens, 16))
    files = open_indexed_files(prefix, "--data-path")
    assert sum(len(window) for window in files.token_windows(1 << 20)) == 1 << 20
    assert sum(len(window) for window in files.token_windows(1 << 18)) == 1 << 18
    tokens[-1] = 99
    write_indexed(tmp_path / "a", np.split(tokens, 16))
    monkeypatch.setattr(validation, "SCANNED_TOKENS", 1 << 18)
    refuses("holds token id 99", data_path=[prefix])


def test_the_sidecar_spares_the_reading_only_while_it_describes_the_data(tmp_path: Path) -> None:
    prefix = dataset(tmp_path, top=60)
    sidecar(prefix, max_token_id=70, vocab_size=71)
    refuses(
        r"token id 70 \(prepared with tok.json of 71 tokens\), but the padded vocabulary has 64", data_path=[prefix]
    )
    sidecar(prefix, max_token_id=70, tokens=1)
    validate(data_path=[prefix])
    Path(prefix + ".meta.json").write_text("{}")
    validate(data_path=[prefix])


@pytest.mark.parametrize(
    "count, split, empty, works",
    [
        (1, "969, 30, 1", "valid", "--split 100,0,0 --eval-iters 0"),
        (12, "969, 30, 1", "valid", "--split 10,1,1"),
        (40, "969, 30, 1", "test", "--split 90,5,5"),
    ],
)
def test_a_split_without_documents_is_refused_with_one_that_works(
    tmp_path: Path, count: int, split: str, empty: str, works: str
) -> None:
    prefix = dataset(tmp_path, count=count)
    refuses(
        rf"--split {split} leaves no document for the {empty} split of --data-path {prefix}, which has {count} "
        rf"documents.*for example {works}\.",
        data_path=[prefix],
        split=split,
    )
    validate(data_path=[prefix], split=works.split()[1])


def test_data_that_are_not_repeated_need_one_whole_sample(tmp_path: Path) -> None:
    small = write_indexed(tmp_path / "small", [np.ones(2)] * 10)
    large, tiny = dataset(tmp_path, "large", count=200), write_indexed(tmp_path / "tiny", [np.ones(1)] * 10)
    message = r"small: its train split has \d+ tokens, and needs at least 33 \(one sample of --seq-length 32"
    refuses(message, data_path=[small, large, large])
    validate(data_path=["0.5", small, "0.5", large])
    validate(data_path=[small])
    refuses(
        r"tiny: its valid split has 1 tokens, and needs at least 2 to be repeated. Use more data", data_path=[tiny]
    )
    refuses(r"valid split has \d+ tokens, and needs at least 33", data_path=[small], full_validation=True)


@pytest.mark.parametrize("split", ["1,2,3,4", "0,0,0", "all"])
def test_a_split_that_is_none_is_refused(tmp_path: Path, split: str) -> None:
    refuses(
        f"--split {split} must be one to three numbers.*Use --split 969,30,1",
        data_path=[dataset(tmp_path)],
        split=split,
    )


def test_a_list_of_paths_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    prefix = dataset(tmp_path)
    refuses("the data paths cannot be read", data_path=[prefix, prefix, "0.5", prefix])
    refuses("the file 0.5.idx does not exist", data_path=["0.5", prefix, prefix])
    refuses("the data paths cannot be read", data_args_path=str(tmp_path / "none"))
    for wrong, shown in (("0", "0.0"), ("-1", "-1.0"), ("inf", "inf"), ("nan", "nan")):
        said = rf"weights \[{shown}, 1.0\]: each must be above 0 and finite"
        refuses(said, data_path=[wrong, prefix, "1", prefix])


def test_evaluation_without_a_validation_set_is_refused(tmp_path: Path) -> None:
    prefix = dataset(tmp_path)
    no_share, no_path = (
        "--eval-iters 2 .*--split 100,0,0 .*--split 99,1,0",
        "--eval-iters 2 .*--valid-data-path PREFIX",
    )
    refuses(no_share, data_path=[prefix], split="100,0,0", eval_iters=2)
    refuses(no_path, train_data_path=[prefix], split=None, eval_iters=2)
    validate(data_path=[prefix], split="100,0,0", eval_iters=0)
    validate(train_data_path=[prefix], valid_data_path=[prefix], split=None, eval_iters=2)
