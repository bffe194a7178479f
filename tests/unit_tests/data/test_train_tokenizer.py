# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_csbp.data import prepare, records, train_tokenizer
from megatron_csbp.data.indexed_files import open_indexed_files

TEXT = Path(records.__file__).read_text() + " größer \N{GRINNING FACE}"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(*flags: object) -> int:
    return train_tokenizer.main([str(flag) for flag in flags])


def refuses(capsys: pytest.CaptureFixture[str], message: str, *flags: object) -> None:
    assert run(*flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train_tokenizer: error: ")
    assert message in error


def test_it_has_the_bytes_and_two_special_tokens_and_keeps_every_text(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "tokenizer"
    assert run("--input", text, "--vocab-size", 400, "--output", folder) == 0
    said = capsys.readouterr().err
    assert f"wrote {folder}: 400 tokens, the mask <|mask|> (1) among them" in said
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}" in said
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|mask|>", 1)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode()) / 2
    assert not {0, 1} & set(ids)


def test_preparation_takes_it_with_its_end_token(text: Path, tmp_path: Path) -> None:
    folder, prefix = tmp_path / "tokenizer", tmp_path / "data"
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"body": "one"}\n{"body": "two"}\n')
    names = ("--end-token", "<end>", "--mask-token", "<m>")
    assert run("--input", lines, "--json-key", "body", "--vocab-size", 258, "--output", folder, *names) == 0
    flags = ["--input", str(lines), "--json-key", "body", "--tokenizer", str(folder), "--append-eod"]
    assert prepare.main([*flags, "--output-prefix", str(prefix)]) == 0
    assert open_indexed_files(str(prefix), "--data-path").sequence_lengths.tolist() == [4, 4]


def test_a_short_text_says_how_many_tokens_it_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("ab")
    assert run("--input", tmp_path / "short.txt", "--vocab-size", 1000, "--output", tmp_path / "tokenizer") == 0
    assert "259 tokens (the text is too short for --vocab-size 1000)" in capsys.readouterr().err


def test_what_cannot_work_is_refused_by_name(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--input", text, "--output", tmp_path / "tokenizer")
    refuses(capsys, "--vocab-size 257 must be at least 258", *common, "--vocab-size", 257)
    refuses(capsys, "must be two different texts", *common, "--vocab-size", 300, "--end-token", "<|mask|>")
    refuses(
        capsys, "--mask-token import: a document holds this", *common, "--vocab-size", 300, "--mask-token", "import"
    )
    refuses(capsys, "--input nowhere does not exist", "--input", "nowhere", "--vocab-size", 300, "--output", tmp_path)
    refuses(capsys, "cannot be written", "--input", text, "--vocab-size", 300, "--output", text / "tokenizer")
    (tmp_path / "empty.txt").write_text("")
    refuses(
        capsys, "holds no text", "--input", tmp_path / "empty.txt", "--vocab-size", 300, "--output", tmp_path / "new"
    )
    assert not (tmp_path / "new").exists()


def test_it_runs_by_its_name() -> None:
    command = [sys.executable, "-m", "megatron_csbp.data.train_tokenizer", "--help"]
    assert "--vocab-size" in subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
