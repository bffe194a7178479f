# SPDX-License-Identifier: Apache-2.0
"""What commands print for a reader who may leave, and the JSON file that they are asked for."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_csbp.results import check_json_file, print_results, write_json
from megatron_csbp.tools.gpu_check.__main__ import main as gpu_check

ROOT = Path(__file__).parents[2]


def test_lines_are_printed_one_below_another(capsys: pytest.CaptureFixture[str]) -> None:
    print_results(["a", "b"])
    assert capsys.readouterr().out == "a\nb\n"


@pytest.mark.parametrize("printed", [1, 200_000], ids=["in the buffer", "more than the pipe holds"])
def test_a_reader_that_goes_first_ends_a_command_without_a_traceback(printed: int) -> None:
    """Also where what is left in the buffer would fail once more as Python ends."""
    code = f"from megatron_csbp.results import print_results\nprint_results(['x' * {printed}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 128 + signal.SIGPIPE


def test_a_json_file_is_written_as_given(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    check_json_file(file)
    write_json(file, {"loss": 1.5})
    check_json_file(file)
    assert json.loads(file.read_text()) == {"loss": 1.5}


def test_a_json_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none" / "a.json"):
        with pytest.raises(ValueError, match=f"--json {path} is a folder, or in one that does not exist; name a file"):
            check_json_file(path)
        with pytest.raises(ValueError, match=f"--json {path} cannot be written: .*; name another file"):
            write_json(path, {})
        with pytest.raises(SystemExit):
            gpu_check(["--device", "cpu", "--json", str(path)])
        assert f"error: --json {path} is a folder" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=f"--json {tmp_path / 'a.json'} cannot be written: no permission"):
        check_json_file(tmp_path / "a.json")
