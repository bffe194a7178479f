# SPDX-License-Identifier: Apache-2.0
"""The demo on a toy: every step as in `make demo`, and what it says when something is wrong."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.forked_module import run_module
from tests.support.megatron_run import ROOT, Ranks, environment

DEMO = ROOT / "examples" / "demo"


def run_demo(output: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO / "run.py"), "--size", "quick", "--output", str(output)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def forked(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The demo, with forked ranks in place of torchrun's: starting these takes most of its time."""

    def logged(command: Sequence[str], log: Path, *_: Any) -> Iterator[str]:
        run = run_module(ranks, command).check()
        log.write_text(run.output)
        yield from run.output.splitlines(keepends=True)

    def written(command: Sequence[str], _: int, log: Path) -> str:
        return "".join(logged(command, log))

    output = tmp_path_factory.mktemp("demo") / "results"
    output.mkdir()
    (output / "made-by-the-demo").touch()
    (output / "stale").touch()
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), demo_modules(patch, "run") as run:
        patch.setattr(sys.modules["training"], "_run_logged", logged)
        patch.setattr(run, "run_command", written)
        patch.setattr(sys, "argv", ["run.py", "--size", "quick", "--output", str(output)])
        status = run.main()
    return subprocess.CompletedProcess(sys.argv, status, printed.getvalue(), ""), output


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("started")
    return run_demo(folder / "results", folder), folder / "results"


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def finished(request: pytest.FixtureRequest) -> tuple[subprocess.CompletedProcess[str], Path]:
    found: tuple[subprocess.CompletedProcess[str], Path] = request.getfixturevalue(request.param)
    return found


@contextlib.contextmanager
def demo_modules(patch: pytest.MonkeyPatch, name: str) -> Iterator[ModuleType]:
    """Import a file of the demo, which imports the others by their bare names."""
    before = set(sys.modules)
    patch.syspath_prepend(DEMO)
    yield import_module(name)
    for module in {"run", "corpus", "picture", "report", "sizes", "training"} & (set(sys.modules) - before):
        sys.modules.pop(module)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with demo_modules(monkeypatch, "report") as module:
        yield module


def test_the_demo_converts_a_model_and_shows_parity_bytes_and_text(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    run, output = finished
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((output / "report.json").read_text())
    runs: dict[str, Any] = record["runs"]
    for scheme in ("one rank", "CP"):
        assert len(runs[scheme]["losses"]) == record["size"]["parity_iterations"]
        for iteration, loss in runs[scheme]["losses"].items():
            assert runs["converted"]["losses"][iteration] == pytest.approx(loss, rel=2e-6)
    for name, training in (
        ("autoregressive", "autoregressive"),
        ("converted", "diffusion"),
        ("from scratch", "diffusion"),
    ):
        iterations = record["size"][training]["iterations"]
        assert len(runs[name]["losses"]) == iterations
        assert str(iterations) in runs[name]["validation"]
    converted, scratch = (min(runs[name]["validation"].values()) for name in ("converted", "from scratch"))
    assert converted < record["size"]["largest_share"] * record["entropy of single tokens"]
    assert converted < scratch
    moved = {scheme: numbers["measured"] for scheme, numbers in record["bytes per layer"].items()}
    assert moved["CP"] == 3 * moved["CSBP"] > 0  # two corrupted copies beside the clean one
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    prompt, _, written = record["text"].partition("def read(self")
    assert prompt.startswith("class Reader:")
    assert written.strip()
    assert "| class Reader:" in run.stdout


def test_the_demo_starts_clean(forked: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, output = forked
    assert not (output / "stale").exists()


def test_the_demo_keeps_megatrons_log_to_files(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run, output = finished
    assert "elapsed time per iteration" in (output / "converted.log").read_text()
    assert "elapsed time per iteration" not in run.stdout
    assert "iteration  12/12" in run.stdout
    assert len(run.stdout.splitlines()) < 100


def test_the_demo_does_not_empty_a_folder_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    run = run_demo(tmp_path, tmp_path)
    assert run.returncode == 1
    assert f"--output {tmp_path} is not empty and was not made by the demo" in run.stderr
    assert (tmp_path / "thesis.tex").exists()


def test_a_curve_that_differs_fails(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    training, sizes = sys.modules["training"], sys.modules["sizes"]
    losses = {1: 7.0, 2: 6.5, 3: 6.0}
    csbp = training.RunRecord(losses=losses, validation={3: 3.1})
    off = training.RunRecord(losses={1: 7.0, 2: 6.5 * (1 + 3e-6)})
    missing = training.RunRecord(losses={4: 5.9})
    traffic = {"CSBP": report.Traffic(10, 10), "CP": report.Traffic(20, 21)}
    parity = {"one rank": report.compare(off, csbp), "CP": report.compare(missing, csbp)}
    runs = {"converted": csbp, "from scratch": training.RunRecord(validation={3: 3.2})}
    assert report.compare(csbp, csbp).holds
    failures = report.print_summary(sizes.SIZES["quick"], runs, 5.0, parity, traffic, sizes.PAPER_CASE)
    assert [failure.split(":")[0] for failure in failures] == [
        "the losses of CSBP and of one rank differ by more than 2e-06",
        "the losses of CSBP and of CP differ by more than 2e-06",
        "the ledger of CP measured 21 bytes, not 20",
    ]
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    "converted, scratch, failures",
    [
        ({9: 4.0}, {9: 4.5}, []),
        (
            {9: 4.9},
            {9: 4.95},
            ["the converted model does not use context: NELBO 4.900, of single tokens 5.000"],
        ),
        ({9: 4.0}, {9: 3.9}, ["converting did not help: NELBO 4.000, from scratch 3.900"]),
        ({}, {9: 3.9}, ["no evaluation in the log of converted"]),
    ],
    ids=["both", "no better than single tokens", "no better than from scratch", "never evaluated"],
)
def test_a_model_that_has_not_learnt_fails(
    converted: dict[int, float], scratch: dict[int, float], failures: list[str], report: ModuleType
) -> None:
    training, sizes = sys.modules["training"], sys.modules["sizes"]
    runs = {
        "converted": training.RunRecord(validation=converted),
        "from scratch": training.RunRecord(validation=scratch),
    }
    assert report.print_summary(sizes.SIZES["full"], runs, 5.0, {}, {}, sizes.PAPER_CASE) == failures


@pytest.mark.parametrize("size_name", ["full", "quick"])
def test_no_text_for_validation_is_trained_on(size_name: str, report: ModuleType) -> None:
    corpus, size = import_module("corpus"), sys.modules["sizes"].SIZES[size_name]
    documents = corpus.standard_library_documents(size.corpus_bytes)
    held_out = corpus.held_out_document(size.held_out_bytes, documents)
    assert held_out not in documents
    assert corpus.held_out_document(size.held_out_bytes, [*documents, held_out]) not in (*documents, held_out)
    with pytest.raises(ValueError, match="no source of at most -1 bytes to hold out"):
        corpus.held_out_document(-1, [])


RANK_0_REFUSES = "megatron_csbp: rank 0: error: --seq-length 72 must be a multiple of 32."
TRACEBACK = ["Traceback (most recent call last):", "RuntimeError: no more memory"]
TORCHRUN = ["E1129 torch/distributed/elastic/multiprocessing/api.py:1002] failed", "ChildFailedError:"]


@pytest.mark.parametrize(
    "printed, shown, hidden",
    [
        (["noise", RANK_0_REFUSES, *TRACEBACK, *TORCHRUN], RANK_0_REFUSES, "no more memory"),
        (["noise", *TRACEBACK, *TORCHRUN], "no more memory", "ChildFailedError"),
    ],
    ids=["our own message", "the end of the traceback"],
)
def test_a_run_that_fails_says_why_and_where_its_log_is(
    printed: list[str], shown: str, hidden: str, report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = sys.modules["training"]
    program = f"print({chr(10).join(printed)!r}); raise SystemExit(3)"
    monkeypatch.setattr(training, "torchrun_command", lambda *_: [sys.executable, "-c", program])
    log = tmp_path / "run.log"
    with pytest.raises(training.DemoError, match="exit status 3") as failure:
        training.train("Training", [], 1, 1, 1, log)
    assert shown in str(failure.value)
    assert hidden not in str(failure.value)
    assert str(log) in str(failure.value)
    assert log.read_text().splitlines() == printed
