# SPDX-License-Identifier: Apache-2.0
"""A user's mistake is one line on standard error and exit status 2; anything else keeps its traceback."""

import warnings
from argparse import ArgumentParser
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_csbp.errors import (
    check_launcher,
    failure_in_words,
    hush_optional_packages,
    say_errors_in_one_line,
    user_errors,
)


def test_a_value_error_becomes_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop, user_errors():
        raise ValueError("--seq-length 7 must be 8.")
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "megatron_csbp: rank 3: error: --seq-length 7 must be 8.\n"
    assert captured.out == ""


@pytest.mark.parametrize("local_rank, printed", [("0", 1), ("1", 0)])
def test_under_torchrun_a_node_prints_once_and_every_rank_leaves_its_message_to_torchrun(
    local_rank: str,
    printed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "error.json"
    for name, value in (("RANK", "9"), ("LOCAL_RANK", local_rank), ("TORCHELASTIC_ERROR_FILE", str(file))):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit), user_errors():
        raise ValueError("--seq-length 7 must be 8.")
    line = "megatron_csbp: rank 9: error: --seq-length 7 must be 8."
    assert capsys.readouterr().err.splitlines() == [line] * printed
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert failure.message == line


def test_warnings_of_optional_packages_are_left_out_and_no_others() -> None:
    def warn(text: str, module: str) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            hush_optional_packages()
            warnings.warn_explicit(text, UserWarning, "file.py", 1, module=module)
        return len(caught)

    for text in (
        "Apex is not installed. Falling back to Torch Norm",
        "Transformer Engine and Apex are not installed. Falling back to local\nimplementations",
        "Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0.",
    ):
        assert warn(text, "megatron.core.models.backends") == 0
        assert warn(text, "mine") == 1
    assert warn("Please specify --split when using --data-path.", "megatron.training.arguments") == 1


def test_outside_torchrun_no_rank_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit), user_errors():
        raise ValueError("no.")
    assert capsys.readouterr().err == "megatron_csbp: error: no.\n"


def test_our_own_faults_pass_through() -> None:
    with pytest.raises(KeyError), user_errors():
        raise KeyError("ours")


def test_argparse_errors_pass_through() -> None:
    with pytest.raises(SystemExit) as stop, user_errors():
        raise SystemExit(0)
    assert stop.value.code == 0


def test_a_process_without_a_rank_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"RANK is not set.*torchrun --nproc-per-node 1"):
        check_launcher(["--seq-length", "64"])
    check_launcher(["--help"])
    monkeypatch.setenv("RANK", "0")
    check_launcher([])


def test_a_bare_assertion_is_shown_as_the_check_that_failed() -> None:
    shown = r"Megatron's check failed \[AssertionError at `raise AssertionError`, test_errors.py:"
    with pytest.raises(ValueError, match=shown), failure_in_words("check"):
        raise AssertionError


@pytest.mark.parametrize(
    "command_line, message",
    [
        (
            "--sequence-lenght 64",
            r"^unrecognized arguments: --sequence-lenght 64 \(did you mean --sequence-length\?\); --h",
        ),
        ("--xyz=1", r"^unrecognized arguments: --xyz=1; --help lists every flag\.$"),
        (
            "--sequence-length many",
            r"^argument --sequence-length: invalid int value: 'many'$",
        ),
    ],
)
def test_a_flag_that_a_parser_refuses_is_one_line_without_its_usage(
    command_line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    parser.add_argument("--sequence-length", type=int)
    say_errors_in_one_line(parser)
    with pytest.raises(ValueError, match=message):
        parser.parse_args(command_line.split())
    assert capsys.readouterr().err == ""
