# SPDX-License-Identifier: Apache-2.0
"""A user's mistake is one line on standard error and exit status 2; anything else keeps its traceback."""

from argparse import ArgumentParser

import pytest

from megatron_csbp.errors import check_launcher, failure_in_words, say_errors_in_one_line, user_errors


def test_a_value_error_becomes_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop, user_errors():
        raise ValueError("--seq-length 7 must be 8.")
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "megatron_csbp: rank 3: error: --seq-length 7 must be 8.\n"
    assert captured.out == ""


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
