# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace

import pytest
import torch
from megatron.core import timers
from megatron.training import global_vars

from megatron_csbp.megatron_reporting import logged_training_seconds
from megatron_csbp.reporting.progress_report import Interval, line, peak_flops, scalars

ARGS = Namespace(clean_seq_length=1024, consumed_train_samples=2000, train_iters=1000, world_size=4)
INTERVAL = Interval(iteration=100, iterations=10, samples=80, flops=8e15, seconds=20.0)


def test_the_numbers_are_those_of_the_interval() -> None:
    assert scalars(INTERVAL, ARGS, peak=989e12) == {
        "clean-tokens-per-second": 80 * 1024 / 20,
        "clean-tokens": 2000 * 1024,
        "tflops-per-rank": pytest.approx(100.0),
        "eta-seconds": 1800.0,
        "mfu": pytest.approx(100 / 989),
    }


def test_the_line_has_them_and_the_utilisation_of_known_devices_only() -> None:
    start = " [csbp] iteration 100/1000 | ETA 0:30:00 | clean tokens per second: 4096.0 | per rank: 1024.0 | "
    assert line(INTERVAL, ARGS, 989e12) == f"{start}clean tokens: 2048000 | TFLOP/s per rank: 100, MFU 10.1% |"
    assert line(INTERVAL, ARGS, None) == f"{start}clean tokens: 2048000 | TFLOP/s per rank: 100 |"


@pytest.mark.parametrize(
    "name, dtype, tera",
    [
        ("NVIDIA H200", torch.bfloat16, 989.0),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.0),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312.0),
        ("NVIDIA GB200", torch.bfloat16, 2500.0),
        ("NVIDIA H200", torch.float32, None),
        ("NVIDIA GeForce", torch.bfloat16, None),
        (None, torch.bfloat16, None),
    ],
)
def test_peaks_are_of_known_devices_in_half_precision(
    name: str | None, dtype: torch.dtype, tera: float | None
) -> None:
    assert peak_flops(name, dtype) == (None if tera is None else tera * 1e12)


def test_time_between_megatrons_line_and_an_evaluation_belongs_to_the_next_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Megatron's own line; holds by name the attribute of its timer that tells the two apart."""
    now, timer = [0.0], timers.Timer("interval-time")
    monkeypatch.setattr(timers.time, "time", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", lambda name: {"interval-time": timer}[name])
    timer.start()
    now[0] = 10.0
    assert timer.elapsed(reset=False) == logged_training_seconds(is_first_line=True) == 10.0
    now[0] = 13.0
    assert timer.elapsed(reset=True) == logged_training_seconds(is_first_line=False) == 13.0
    now[0] = 15.0
    timer.stop()
    now[0] = 115.0  # an evaluation
    assert logged_training_seconds(is_first_line=False) == 13.0
    timer.start()
    assert logged_training_seconds(is_first_line=False) == 13.0
    now[0] = 120.0
    assert timer.elapsed(reset=True) == 7.0
    assert logged_training_seconds(is_first_line=False) == 20.0
