# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer

from megatron_csbp.data import chat_templates, prepare, records, train_tokenizer
from megatron_csbp.data.indexed_files import open_indexed_files

TEXT = Path(records.__file__).read_text() + Path(chat_templates.__file__).read_text()
CHAT = [
    {"role": "system", "content": "Be  brief. "},
    {"role": "user", "content": "What is größer?"},
    {"role": "assistant", "content": " 2 \N{GRINNING FACE}, of course\n"},
    {"role": "user", "content": "And\n\n"},
    {"role": "assistant", "content": "\n  3  "},
]
ANSWERS = [" 2 \N{GRINNING FACE}, of course\n<|im_end|>", "\n  3  <|im_end|>"]
UNMARKED = chat_templates.CHATML_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
FORGETFUL = UNMARKED.replace("message['content'] +", "(message['content'] if loop.last else '...') +")
REFUSING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + UNMARKED


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(TEXT + " größer\n\n")
    flags = [
        "--input",
        folder / "text.txt",
        "--vocab-size",
        400,
        "--output",
        folder / "t",
        "--chat-template",
        "chatml",
    ]
    assert train_tokenizer.main([str(flag) for flag in flags]) == 0
    return folder / "t"


def template(folder: Path, text: str) -> Path:
    path = folder / "template.jinja"
    path.write_text(text)
    return path


def lines(folder: Path, *objects: Any) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in objects))
    return path


def run(tokenizer: Path, source: Path, *flags: object) -> int:
    common = ["--input", source, "--tokenizer", tokenizer, "--output-prefix", source.parent / "out"]
    return prepare.main([str(flag) for flag in [*common, *flags]])


def learnt(tokenizer: Path, folder: Path) -> list[tuple[str, list[str]]]:
    """Return each document's text, and the runs of tokens in it that are learnt."""
    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    prefix = str(folder / "out")
    documents, marks = IndexedDataset(prefix), IndexedDataset(f"{prefix}.loss")
    assert np.array_equal(documents.sequence_lengths, marks.sequence_lengths)
    found = []
    for number in range(len(documents)):
        ids, marked = documents[number], np.concatenate([[0], marks[number].astype(int), [0]])
        starts, stops = np.flatnonzero(np.diff(marked) == 1), np.flatnonzero(np.diff(marked) == -1)
        runs = [decode(ids[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        found.append((decode(ids), runs))
    return found


def test_the_templates_markers_say_what_is_learnt(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tokenizer, lines(tmp_path, {"messages": CHAT})) == 0
    ((text, runs),) = learnt(tokenizer, tmp_path)
    hugging_face = AutoTokenizer.from_pretrained(tokenizer)
    assert text == hugging_face.apply_chat_template(CHAT, tokenize=False)
    assert runs == ANSWERS
    assert "marked in" in (said := capsys.readouterr().err)
    assert "by generation markers of the chat template" in said
    with_mask = hugging_face.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    tokens, marks = (IndexedDataset(str(tmp_path / name)) for name in ("out", "out.loss"))
    assert tokens[0].tolist() == with_mask["input_ids"]
    assert marks[0].tolist() == with_mask["assistant_masks"]
    metadata = open_indexed_files(str(tmp_path / "out"), "--data-path").metadata()
    assert metadata is not None
    assert metadata.supervised_tokens == sum(with_mask["assistant_masks"])
    assert metadata.answers_found_by == ["generation markers of the chat template"]


def test_without_markers_an_answer_is_what_its_turn_adds(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lines(tmp_path, {"messages": CHAT})
    assert run(tokenizer, source, "--chat-template", template(tmp_path, UNMARKED)) == 0
    ((_, runs),) = learnt(tokenizer, tmp_path)
    assert runs == [f"{answer}\n" for answer in ANSWERS]
    assert "by turn boundaries" in capsys.readouterr().err


@pytest.mark.parametrize("marked", [True, False])
def test_of_prompt_and_completion_only_the_completion_is_learnt(tokenizer: Path, tmp_path: Path, marked: bool) -> None:
    pair = {"prompt": "def add(a, b):", "completion": "\n    return a + b\n"}
    messages = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    given = [] if marked else ["--chat-template", template(tmp_path, UNMARKED)]
    assert run(tokenizer, lines(tmp_path, pair, messages, {"text": "plain"}), "--append-eod", *given) == 0
    (text, runs), (_, of_messages), plain = learnt(tokenizer, tmp_path)
    assert text == pair["prompt"] + pair["completion"] + "<|endoftext|>"
    assert runs == [pair["completion"] + "<|endoftext|>"]
    assert of_messages == [ANSWERS[1] if marked else f"{ANSWERS[1]}\n"]
    assert plain == ("plain<|endoftext|>", ["plain<|endoftext|>"])


def test_marks_begin_at_the_first_document_that_needs_them_and_go_when_none_does(
    tokenizer: Path, tmp_path: Path
) -> None:
    source = lines(tmp_path, {"text": "one two"}, {"messages": CHAT})
    assert run(tokenizer, source) == 0
    assert learnt(tokenizer, tmp_path)[0] == ("one two", ["one two"])
    assert run(tokenizer, lines(tmp_path, {"text": "one two"})) == 0
    assert {path.name for path in tmp_path.glob("out*")} == {"out.bin", "out.idx", "out.counts.npy", "out.meta.json"}


def test_several_workers_write_the_same_and_name_the_same_faults(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [{"messages": CHAT[: 3 + 2 * (number % 2)]} for number in range(300)]
    source = lines(tmp_path, *[{"text": "a " * number} for number in range(300)], *chats, {"messages": []})
    written, file = [], tokenizer / "tokenizer.json"  # quicker than the folder, which needs transformers' registry
    for workers in (1, 2):
        assert run(file, source, "--on-error", "skip", "--workers", workers, "--chat-template", "chatml") == 0
        assert "left out 1 records that cannot be used: --input file" in capsys.readouterr().err
        written.append([(tmp_path / f"out{ending}").read_bytes() for ending in (".bin", ".loss.bin", ".loss.idx")])
    assert written[0] == written[1]


ROLE, NO_ANSWER = {"role": "user", "content": "a"}, "has no message with the role assistant (roles: user)"
USER = {"messages": [ROLE]}
FAULTS: dict[str, tuple[Any, str]] = {
    "not JSON": ('{"messages": [', "is not JSON (Expecting value). Each line must be one JSON object."),
    "no object": ("[1]", "is list and no object with keys. Each line must be one JSON object."),
    "no known key": ({"body": "a"}, "has no text or prompt and completion or messages (it has: body). Name the key"),
    "a prompt alone": ({"prompt": "a"}, "has no text or prompt and completion or messages (it has: prompt). Name"),
    "two kinds": (
        {"text": "a", "messages": []},
        "is more than one kind of record (it has: text, messages). Say which",
    ),
    "text that is none": ({"text": 3}, "has int under the key text, and text is needed. Write it as a string."),
    "a completion that is none": ({"prompt": "a", "completion": 1}, "has int under the key completion, and text"),
    "an empty completion": ({"prompt": "a", "completion": ""}, "has an empty completion, so that there is nothing"),
    "messages that are none": ({"messages": "hello"}, "has str under the key messages, and a list of messages is"),
    "no messages": ({"messages": []}, "has an empty list under the key messages, and a list of messages is needed"),
    "a message that is none": ({"messages": ["a"]}, "has a message 1 of messages without a role, and each needs one"),
    "a message without a role": ({"messages": [ROLE, {"content": "a"}]}, "has a message 2 of messages without a role"),
    "a message without content": (
        {"messages": [{"role": "user"}]},
        "has NoneType as content of message 1 of messages",
    ),
    "a message with parts": ({"messages": [{"role": "user", "content": []}]}, "has list as content of message 1"),
    "no answer": (USER, NO_ANSWER),
    "no answer in the completion": ({"prompt": CHAT, "completion": [ROLE]}, NO_ANSWER),
    "tools that are none": ({"messages": CHAT, "tools": "x"}, "has str under the key tools, and a list is needed."),
    "half a surrogate pair": ({"messages": [{"role": "user", "content": "a\ud800"}]}, "has half a surrogate pair"),
    "not UTF-8": ('{"text": "\udcff"}', "is not UTF-8 text (byte 10). Convert it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_file_and_line_with_its_remedy_and_leaves_nothing(
    fault: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, said = FAULTS[fault]
    source = tmp_path / "chats.jsonl"
    text = json.dumps({"messages": CHAT}) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n"
    source.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert run(tokenizer, source) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"prepare: error: --input file {source}, line 2, {said}")
    assert error.endswith("Or leave such records out with --on-error skip.")
    assert not list(tmp_path.glob("out*"))
    assert run(tokenizer, source, "--on-error", "skip") == 0
    assert f"left out 1 records that cannot be used: --input file {source}, line 2, {said}" in capsys.readouterr().err
    assert len(learnt(tokenizer, tmp_path)) == 1


def test_the_first_few_of_many_faults_are_shown(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tokenizer, lines(tmp_path, *[USER] * 5, {"messages": CHAT}), "--on-error", "skip") == 0
    said = capsys.readouterr().err
    assert "left out 5 records" in said
    assert "line 3, has" in said
    assert "line 4, has" not in said
    assert "; and 2 more" in said
    assert run(tokenizer, lines(tmp_path, USER), "--on-error", "skip") == 2
    assert "holds no text (1 files). left out 1 records" in capsys.readouterr().err


def test_what_a_template_cannot_do_is_said_in_one_line(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(message: str, source: Path, *flags: object) -> None:
        assert run(tokenizer, source, *flags) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert message in error
        assert not list(tmp_path.glob("out*"))

    chat = lines(tmp_path, {"messages": CHAT})
    forgetful = ("--chat-template", template(tmp_path, FORGETFUL))
    refuses(
        "renders message 3 differently when others follow, so that answers cannot be found. Give", chat, *forgetful
    )
    refuses(f"(Seen at {chat}, line 1.)", chat, *forgetful)
    refusing = ("--chat-template", template(tmp_path, REFUSING))
    refuses(f"{chat}, line 1, is refused by the chat template (begin with the user). Mend", chat, *refusing)
    refuses("--chat-template nowhere cannot be read", chat, "--chat-template", "nowhere")
    bad = template(tmp_path, "{% for %}")
    refuses("is refused by the chat template (Expected an expression", chat, "--chat-template", bad)
    plain = tmp_path / "plain"
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(plain)
    (plain / "chat_template.jinja").unlink()
    assert run(plain, chat) == 2
    error = capsys.readouterr().err
    assert f"--tokenizer {plain} has no chat template, and there are chats in the data. Give --chat-template" in error
    assert run(plain, chat, "--chat-template", "chatml") == 0
    capsys.readouterr()
    begins = lines(tmp_path, {"messages": CHAT[2:]})
    for path in tmp_path.glob("out*"):
        path.unlink()
    unmarked = ("--chat-template", template(tmp_path, UNMARKED))
    refuses("line 1, begins with a message of the assistant, for which there is no prompt", begins, *unmarked)


def test_chatml_needs_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    folder, source = tmp_path / "t", lines(tmp_path, {"messages": CHAT})
    flags = ["--input", str(tmp_path / "text.txt"), "--vocab-size", "300", "--output", str(folder)]
    assert train_tokenizer.main(flags) == 0
    assert run(folder, source, "--chat-template", "chatml") == 2
    assert "has no token <|im_start|> and <|im_end|>" in capsys.readouterr().err


def test_the_tokenizers_own_mask_in_the_data_is_said(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tokenizer, lines(tmp_path, {"text": "a <|mask|> and <|mask|>"})) == 0
    assert "the tokenizer's mask token 1 occurs 2 times, so that training cannot" in capsys.readouterr().err
    assert open_indexed_files(str(tmp_path / "out"), "--data-path").count(1, 10)[0] == 2


def test_what_a_killed_run_left_is_cleared_away(tokenizer: Path, tmp_path: Path) -> None:
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "data.bin").write_bytes(b"half")
    (left / "data.loss.bin").write_bytes(b"half")
    assert run(tokenizer, lines(tmp_path, {"text": "one"})) == 0
    assert {path.name for path in tmp_path.glob("out*")} == {"out.bin", "out.idx", "out.counts.npy", "out.meta.json"}


def test_two_runs_with_one_prefix_are_kept_apart(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_csbp.data.prepared_files import whole_output

    with whole_output(str(tmp_path / "out")):
        assert run(tokenizer, lines(tmp_path, {"text": "one"})) == 2
        assert "another process is preparing data there" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_failure_between_the_names_leaves_no_dataset_that_mixes_old_and_new(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_csbp.data import prepared_files

    source = lines(tmp_path, {"text": "one"})
    assert run(tokenizer, source) == 0

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(prepared_files.os, "replace", fail)
    assert run(tokenizer, source) == 2
    assert "cannot be written: disk full" in capsys.readouterr().err
    assert not (tmp_path / "out.idx").exists()


def test_parquet_rows_are_records(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="Parquet files are not checked: pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"messages": [CHAT, None, CHAT[:3]], "text": [None, "plain", None]})
    source = tmp_path / "chats.parquet"
    parquet.write_table(table, source)
    assert run(tokenizer, source) == 0
    found = learnt(tokenizer, tmp_path)
    assert [runs for _, runs in found] == [ANSWERS, ["plain"], ANSWERS[:1]]
    parquet.write_table(arrow.table({"messages": [CHAT, CHAT[:1]]}), source)
    assert run(tokenizer, source) == 2
    assert f"--input file {source}, row 2, has no message with the role assistant" in capsys.readouterr().err
    source.write_bytes(source.read_bytes()[:-20])
    assert run(tokenizer, source) == 2
    assert f"--input file {source} cannot be read as Parquet: " in capsys.readouterr().err


def test_parquet_without_pyarrow_names_the_extra(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    source = tmp_path / "chats.parquet"
    source.write_bytes(b"PAR1")
    assert run(tokenizer, source) == 2
    assert "pip install 'megatron-csbp[parquet]'" in capsys.readouterr().err
