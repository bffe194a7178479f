# SPDX-License-Identifier: Apache-2.0
"""`CUDA_DEVICE_MAX_CONNECTIONS` is set where Megatron demands it, in time, and asked for in words elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_csbp.configuration.hardware_queues import VARIABLE, check_one_queue, set_one_queue
from tests.support.megatron_arguments import parse

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "flags, value",
    [
        ("--context-parallel-size 2", "1"),
        ("--tensor-model-parallel-size=2", "1"),
        ("--bp-size 2", "1"),
        ("--yaml-cfg FILE", "1"),
        ("--yaml-cfg FILE --bp-size 1 --context-parallel-size 1", None),
        ("--yaml-cfg none.yaml", None),
        ("", None),
        ("--context-parallel-size 2 --use-torch-fsdp2", None),
        ("--context-parallel-size 2 --overlap-moe-expert-parallel-comm", None),
        ("--context-parallel-size two", None),
        ("--help", None),
    ],
)
def test_the_variable_is_set_where_megatron_demands_it(flags: str, value: str | None, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("parallel:\n  context-parallel-size: 2\n  block_parallel_size: 2\nno-rope-fusion: true\n")
    environ: dict[str, str] = {}
    said = set_one_queue(flags.replace("FILE", str(file)).split(), environ)
    assert environ.get(VARIABLE) == value
    assert (said is not None) == (value is not None)


def test_what_the_user_has_set_stays() -> None:
    environ = {VARIABLE: "8"}
    assert set_one_queue(["--bp-size", "2"], environ) is None
    assert environ == {VARIABLE: "8"}


@pytest.mark.parametrize("entry", ["pretrain_gpt", "launch"])
def test_the_entries_set_it_before_anything_has_asked_for_cuda(entry: str, tmp_path: Path) -> None:
    """CUDA starts with the first question for a device, and the runtime is chosen by that question."""
    watch = (
        f"import sys, os, torch; from megatron_csbp import cpu_runtime, {entry} as entry; asked = [];"
        "torch.cuda.is_available = lambda: asked.append('early') or False;"
        f"cpu_runtime.install = lambda device: sys.exit(os.environ.get('{VARIABLE}', '') + ''.join(asked));"
        f"sys.argv = ['entry', *(['setup.py'] if '{entry}' == 'launch' else []), '--bp-size', '2'];"
        "open('setup.py', 'a').close();"
        "entry.main()"
    )
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"RANK": "0"}
    environ["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, "-c", watch], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.stderr.split()[-1:] == ["1"], run.stderr


@pytest.mark.parametrize("value", [None, "8"])
def test_a_wrong_value_is_refused_before_megatron_with_the_line_to_say(value: str | None) -> None:
    args, _ = parse("--context-parallel-size 2")
    with pytest.raises(ValueError, match=rf"capability 9. Say export {VARIABLE}=1 where"):
        check_one_queue(args, 9, value)
    check_one_queue(args, 9, "1")
    check_one_queue(args, 10, value)
    check_one_queue(parse("")[0], 9, value)
    check_one_queue(parse("--context-parallel-size 2 --use-megatron-fsdp")[0], 9, value)
