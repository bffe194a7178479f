# SPDX-License-Identifier: Apache-2.0
"""Exposed communication is what collectives take while nothing else runs, by GPU, from a trace."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_csbp.tools.exposed_time import Exposed, exposed_time, main


def on_gpu(name: str, start: float, duration: float, device: int = 0, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "args": {"device": device}}


TRACE = [
    {"ph": "M", "name": "process_name"},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1000},
    on_gpu("gemm", 0, 10),
    on_gpu("ncclDevKernel_AllGather_RING_LL(...)", 5, 20),  # 5 to 25
    on_gpu("flash", 12, 8),  # 12 to 20
    on_gpu("Memcpy DtoD", 22, 1, cat="gpu_memcpy"),
    on_gpu("ncclDevKernel_ReduceScatter", 30, 10),
    on_gpu("gemm", 0, 4, device=1),
]


def test_it_is_the_time_of_collectives_beside_which_nothing_runs() -> None:
    # 10-12, 20-22 and 23-25 of the first, all of the second.
    assert exposed_time(TRACE) == [Exposed(0, 30.0, 16.0, 40.0), Exposed(1, 0.0, 0.0, 4.0)]


def test_overlapping_collectives_count_once() -> None:
    events = [on_gpu("nccl a", 0, 10), on_gpu("nccl b", 5, 10), on_gpu("gemm", 8, 2)]
    assert exposed_time(events) == [Exposed(0, 15.0, 13.0, 15.0)]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_line_for_each_gpu_is_printed(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = tmp_path / f"trace{suffix}", json.dumps({"traceEvents": TRACE}).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    main([str(path)])
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("GPU 0: 0.040 ms, collectives 0.030 ms, of which exposed 0.016 ms (40.0% of the time)")
    assert "GPU 1" in second


@pytest.mark.parametrize(
    "text, complaint", [("{", "is no trace"), ("[]", "is no trace"), ('{"traceEvents": []}', "no GPU")]
)
def test_anything_else_is_refused(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "trace.json")])
    assert complaint in capsys.readouterr().err
