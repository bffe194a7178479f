# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_csbp.data import prepare
from megatron_csbp.data.validation import validate_data_files
from tests.unit_tests.data.support import megatron_args

WORDS = ["<eod>", "<mask>", "<unk>", "a", "b", "c", "d"]
IDS = {word: number for number, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(path))
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "1.txt").write_text("a b c")
    (folder / "2.txt").write_text("")
    (folder / "sub" / "3.txt").write_text("d d")
    (folder / "sub" / "4.md").write_text("c")
    (folder / ".hidden.txt").write_text("a a a a")
    (folder / "5.jsonl").write_text('{"text": "b a"}\n\n{"text": "é"}\n')
    return folder


def run(*flags: object) -> int:
    return prepare.main([str(flag) for flag in flags])


def documents_of(prefix: Path) -> list[list[str]]:
    dataset = IndexedDataset(str(prefix))
    return [[WORDS[token] for token in dataset[number]] for number in range(len(dataset))]


def refuses(capsys: pytest.CaptureFixture[str], message: str, *flags: object) -> None:
    assert run(*flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("prepare: error: ")
    assert message in error


def test_text_becomes_the_documents_that_megatron_reads(
    corpus: Path, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "data"
    assert run("--input", corpus, "--tokenizer", tokenizer, "--output-prefix", out) == 0
    assert documents_of(out) == [["a", "b", "c"], ["b", "a"], ["<unk>"], ["d", "d"], ["c"]]
    said = capsys.readouterr().err
    assert "5/5 files, 5 documents, 9 tokens" in said
    assert "left out 1 empty documents" in said
    assert json.loads(Path(f"{out}.meta.json").read_text()) == {
        "tokenizer": tokenizer,
        "vocab_size": 7,
        "max_token_id": 6,
        "tokens": 9,
        "documents": 5,
        "supervised_tokens": 9,
        "answers_found_by": [],
    }
    assert np.load(f"{out}.counts.npy").tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert IndexedDataset(str(out)).index.dtype is np.uint16
    validate_data_files(megatron_args(data_path=[str(out)], padded_vocab_size=7, split="1,0,0"))
    assert {path.name for path in out.parent.iterdir()} == {
        "data.bin",
        "data.idx",
        "data.counts.npy",
        "data.meta.json",
    }


def test_inputs_globs_keys_and_the_end_token_are_chosen(corpus: Path, tmp_path: Path, tokenizer: str) -> None:
    lines, out = tmp_path / "lines.jsonl", tmp_path / "out"
    lines.write_text('{"content": "c d"}\n')
    common = ("--tokenizer", tokenizer, "--output-prefix", out, "--append-eod", "--eod-token", "<eod>")
    assert run("--input", corpus, "--glob", "*.md", "3*", *common) == 0
    assert documents_of(out) == [["d", "d", "<eod>"], ["c", "<eod>"]]
    assert run("--input", lines, "--json-key", "content", *common) == 0
    assert documents_of(out) == [["c", "d", "<eod>"]]


def test_it_runs_by_its_name() -> None:
    command = [sys.executable, "-m", "megatron_csbp.data.prepare", "--help"]
    assert "--tokenizer" in subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_a_hugging_face_folder_names_its_own_end_token(corpus: Path, tmp_path: Path, tokenizer: str) -> None:
    folder, out = tmp_path / "hf", tmp_path / "out"
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<eod>", unk_token="<unk>").save_pretrained(folder)
    flags = ("--tokenizer", folder, "--output-prefix", out, "--append-eod")
    assert run("--input", corpus / "1.txt", *flags) == 0
    assert documents_of(out) == [["a", "b", "c", "<eod>"]]


def test_a_failure_leaves_the_earlier_output_as_it_was(
    corpus: Path, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    common = ("--tokenizer", tokenizer, "--output-prefix", out)
    assert run("--input", corpus / "1.txt", *common) == 0
    (corpus / "6.bin").write_bytes(b"a b \xff\xfe")
    refuses(capsys, f"--input file {corpus}/6.bin, is not UTF-8 text (byte 4)", "--input", corpus, *common)
    assert documents_of(out) == [["a", "b", "c"]]
    assert not list(tmp_path.glob("*.partial*"))
    assert run("--input", corpus, "--on-error", "skip", *common) == 0
    assert len(documents_of(out)) == 5


def test_cached_sample_indices_of_older_data_are_removed(
    corpus: Path, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "out" / "cache" / "GPTDataset_indices"
    cache.mkdir(parents=True)
    (cache / "x-sample_index.npy").write_bytes(b"old")
    assert run("--input", corpus / "1.txt", "--tokenizer", tokenizer, "--output-prefix", tmp_path / "out") == 0
    assert not cache.exists()
    assert "removed 1 cached sample indices" in capsys.readouterr().err


def test_bad_input_is_refused_by_name(
    corpus: Path, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--tokenizer", tokenizer, "--output-prefix", tmp_path / "out")
    bad, other = tmp_path / "bad.jsonl", tmp_path / "other.jsonl"
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    bad.write_text('{"text": "a"}\n{"text": \n')
    other.write_text('{"body": "a"}\n')
    refuses(capsys, "--input nowhere does not exist", "--input", "nowhere", *out)
    said = "matches --glob *.rst. It has 3 *.txt, 1 *.jsonl, 1 *.md: for example --glob '*.txt'."
    refuses(capsys, said, "--input", corpus, "--glob", "*.rst", *out)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / ".text.txt").write_text("a")
    refuses(capsys, "There is no file in it, hidden ones apart", "--input", hidden, *out)
    refuses(capsys, "2.txt holds no text (1 files)", "--input", corpus / "2.txt", *out)
    refuses(capsys, f"--input file {binary}, line 2, is not UTF-8 text (byte 10)", "--input", binary, *out)
    refuses(capsys, f"--input file {bad}, line 2, is not JSON", "--input", bad, *out)
    refuses(
        capsys,
        f"--input file {other}, line 1, has no text or prompt and completion or messages (it has: body). Name the key",
        "--input",
        other,
        *out,
    )
    refuses(capsys, "--workers 0 must be at least 1", "--input", corpus, "--workers", 0, *out)
    assert not list(tmp_path.glob("out*"))


def test_json_lines_are_known_by_name_and_by_what_they_hold(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, out = '{"text": "a b"}\n{"text": "c"}\n', tmp_path / "out"
    common = ("--tokenizer", tokenizer, "--output-prefix", out)
    for name in ("corpus.json", "corpus.JSONL", "corpus.ndjson"):
        (tmp_path / name).write_text(lines)
        assert run("--input", tmp_path / name, *common) == 0
        assert documents_of(out) == [["a", "b"], ["c"]]
    (tmp_path / "corpus.txt").write_text(lines)
    said = (
        "corpus.txt begins with a JSON object that has the key text, but is not named .jsonl. Say what it is: --format"
    )
    refuses(capsys, said, "--input", tmp_path / "corpus.txt", *common)
    assert run("--input", tmp_path / "corpus.txt", "--format", "jsonl", *common) == 0
    assert documents_of(out) == [["a", "b"], ["c"]]
    for content in ('[{"text": "a"}]', '{\n "text": "a"\n}'):
        (tmp_path / "array.json").write_text(content)
        refuses(capsys, "array.json is JSON, but not one object a line", "--input", tmp_path / "array.json", *common)
    assert run("--input", tmp_path / "array.json", "--format", "text", *common) == 0
    assert len(documents_of(out)) == 1


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: str) -> None:
    out = tmp_path / "out"
    for name, content in (("1.txt", "a b"), ("2.jsonl", '{"text": "a b"}\n'), ("3.json", '{"text": "a b"}\n')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert run("--input", tmp_path / name, "--tokenizer", tokenizer, "--output-prefix", out) == 0
        assert documents_of(out) == [["a", "b"]]


@pytest.mark.parametrize("workers", [1, 2])
def test_half_a_surrogate_pair_is_refused_by_line_or_left_out(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    path, out = tmp_path / "half.jsonl", tmp_path / "out"
    path.write_text('{"text": "a"}\n{"text": "b \\ud800 c"}\n{"text": "d \\ud83d\\ude00"}\n')
    common = ("--input", path, "--tokenizer", tokenizer, "--output-prefix", out, "--workers", workers)
    refuses(capsys, f"--input file {path}, line 2, has half a surrogate pair, '\\ud800', at character 2", *common)
    assert run("--on-error", "skip", *common) == 0
    assert documents_of(out) == [["a"], ["d", "<unk>"]]


def test_json_that_python_cannot_hold_is_refused_by_line(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--tokenizer", tokenizer, "--output-prefix", tmp_path / "out")
    for name, value in (("deep", "[" * 200_000), ("long", "9" * 5000)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f'{{"text": "a"}}\n{{"number": {value}, "text": "a"}}\n')
        refuses(capsys, f"--input file {path}, line 2, is not JSON (", "--input", path, *out)


def test_bad_tokenizers_and_outputs_are_refused_by_name(
    corpus: Path, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = ("--input", corpus / "1.txt"), ("--output-prefix", tmp_path / "out")
    not_a_folder = ("--output-prefix", corpus / "1.txt" / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(capsys, "1.txt is not a tokenizer file", *text, "--tokenizer", corpus / "1.txt", *out)
    refuses(capsys, f"--tokenizer {empty} cannot be loaded", *text, "--tokenizer", empty, *out)
    refuses(capsys, "names no end-of-document token", *text, "--tokenizer", tokenizer, "--append-eod", *out)
    refuses(
        capsys, "--eod-token <x> is not in the vocabulary", *text, "--tokenizer", tokenizer, "--eod-token", "<x>", *out
    )
    refuses(capsys, "cannot be written", *text, "--tokenizer", tokenizer, *not_a_folder)
    refuses(
        capsys,
        f"is a folder; the prefix is the beginning of the files' names, for example {tmp_path}/train.",
        *text,
        "--tokenizer",
        tokenizer,
        "--output-prefix",
        f"{tmp_path}/",
    )
