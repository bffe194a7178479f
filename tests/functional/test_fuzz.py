# SPDX-License-Identifier: Apache-2.0
"""Whatever a user gives, a run is accepted and does something, or ends with one of our lines.

Never with another exception, never with status 0 and nothing done, never with a hang. A small sample of cases runs
with the tests, always the same one; `make fuzz` draws many more.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from megatron_csbp.data import prepare
from tests.functional.model_flags import BLOCK_DIFFUSION, TIED, iterations
from tests.support.fuzz_flags import added, command_lines
from tests.support.megatron_run import Finished, Ranks

SECONDS = 120.0
IS_LONG = settings.get_current_profile_name() == "fuzz"


def examples(short: int) -> Any:
    """Set the number of cases, which `make fuzz` multiplies by twenty; only there a failing one is made smaller."""
    if IS_LONG:
        return settings(max_examples=short * 20, database=None)
    only = (Phase.explicit, Phase.generate)
    return settings(max_examples=short, derandomize=True, database=None, phases=only, report_multiple_bugs=False)


def judge(run: Finished, case: object, *done: str) -> bool:
    """Fail unless a run did something or was refused in one line; return whether it was accepted.

    Args:
        run: of one rank.
        case: what it was given.
        done: what an accepted run has printed.
    """
    lines = [line for line in run.output.splitlines() if line.startswith("megatron_csbp: ") and " error: " in line]
    said = f"{case}\nstatus {run.returncodes}, timed out: {run.timed_out}\n{run.tail}"
    assert not run.timed_out, said
    if run.returncodes == [0]:
        assert [words for words in done if words not in run.output] == [], said
        event("accepted")
        return True
    assert run.returncodes == [2], said
    assert len(lines) == 1, said
    assert "Traceback" not in run.output, said
    assert any(named in lines[0] for named in ("--", "/", "Megatron's ")), said
    event("refused")
    return False


@examples(16)
@given(command_lines(), st.sampled_from([1, 2, 4, 6, 16]))
def test_a_command_line_would_start_or_is_refused_in_one_line(ranks: Ranks, flags: list[str], size: int) -> None:
    hooks = ["tests.functional.hooks:forget_the_launcher"]
    run = ranks.train([*flags, "--csbp-dry-run", str(size)], hooks=hooks, timeout=SECONDS)
    judge(run, [*added(flags), size], "every check passed")


@examples(4)
@given(command_lines(most_changes=3))
def test_what_is_accepted_trains(ranks: Ranks, flags: list[str]) -> None:
    run = ranks.train(flags, timeout=SECONDS)
    if judge(run, added(flags)):
        assert run.losses(), f"{added(flags)}\n{run.tail}"


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    ranks.train([*TIED, *BLOCK_DIFFUSION, *iterations(1), "--save", str(folder)]).check()
    return folder


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, float]:
    """A file of a checkpoint, what happens to it, and where in it.

    The tensors' own bytes are left alone: only reading them all, which is Megatron's work, would notice.
    """
    file = draw(st.sampled_from(["*.txt", "*/metadata.json", "*/.metadata", "*/common.pt", "*/*.distcp"]))
    ways = ["cut", "remove"] if "distcp" in file else ["cut", "garble", "zero", "remove", "fill"]
    return file, draw(st.sampled_from(ways)), draw(st.floats(0, 0.999))


def damage(folder: Path, pattern: str, how: str, place: float) -> None:
    for file in folder.glob(pattern):
        content = file.read_bytes()
        at = int(len(content) * place)
        if how == "remove":
            file.unlink()
            continue
        middle = {"cut": b"", "garble": b"\xff\x00{", "zero": bytes(4096), "fill": b"9" * 64}[how]
        file.write_bytes(content[:at] + middle + (b"" if how == "cut" else content[at + len(middle) :]))


@examples(8)
@given(damages())
def test_a_damaged_checkpoint_trains_on_or_is_refused_in_one_line(
    ranks: Ranks, checkpoint: Path, how: tuple[str, str, float]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        damage(Path(folder), *how)
        longer = [*iterations(2), "--override-opt-param-scheduler"]
        run = ranks.train([*TIED, *BLOCK_DIFFUSION, *longer, "--load", folder], timeout=SECONDS)
        if judge(run, how):
            assert run.losses(), f"{how}\n{run.tail}"


def record(text: object) -> bytes:
    return json.dumps({"text": text}).encode()


values = st.recursive(st.none() | st.booleans() | st.floats(), lambda inner: st.lists(inner, max_size=3))
ODD_LINES = [b"\xef\xbb\xbf", bytes(9), b"[" * 9999, b'{"text": "\\ud800"}', b'{"text": "cut', b"{}", b"\r"]
texts = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(max_size=20).map(record),
    values.map(record),
    st.sampled_from(ODD_LINES),
)
HOW = ["", "--on-error skip", "--append-eod --eod-token <|endoftext|>", "--format jsonl", "--format text"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_csbp.data.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some words of a text"], folder, 258)
    return folder / "tokenizer.json"


@examples(15)
@given(
    lines=st.lists(texts, max_size=4),
    name=st.sampled_from(["a.jsonl", "a.txt", "a.json", "a"]),
    more=st.sampled_from(HOW),
)
def test_damaged_text_is_prepared_or_refused_in_one_line(
    tokenizer: Path, lines: list[bytes], name: str, more: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(b"\n".join(lines))
        prefix = Path(folder) / "out"
        command = ["--input", str(Path(folder) / name), "--tokenizer", str(tokenizer), "--output-prefix", str(prefix)]
        status = prepare.main([*command, *more.split()])
        written = [Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".meta.json")]
        if status == 0:
            assert all(file.stat().st_size for file in written)
        else:
            assert status == 2
            assert [file for file in written if file.exists()] == []
