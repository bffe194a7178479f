# SPDX-License-Identifier: Apache-2.0
"""Lengths, and the tables with what a user adds to them."""

from pathlib import Path

import pytest

from megatron_csbp.reporting.attention_model import H200
from megatron_csbp.reporting.progress_report import PEAK_TFLOPS
from megatron_csbp.tools.dry_run.lengths import tokens_of, with_lengths_in_tokens
from megatron_csbp.tools.dry_run.tables import read_tables


@pytest.mark.parametrize("text, tokens", [("256K", 262_144), ("64k", 65_536), ("1M", 2**20), ("512", 512)])
def test_lengths(text: str, tokens: int) -> None:
    assert tokens_of(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5K", "64KB"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of tokens, such as 262144, 256K or 1M"):
        tokens_of(text)


def test_lengths_on_a_command_line() -> None:
    words = ["--seq-length", "64K", "--max-position-embeddings=1M", "--save", "64K"]
    assert with_lengths_in_tokens(words) == [
        "--seq-length",
        "65536",
        f"--max-position-embeddings={2**20}",
        "--save",
        "64K",
    ]


def test_the_h200_of_the_tables_is_that_of_the_attention_model_and_peaks_are_those_of_the_progress_report() -> None:
    gpus = read_tables().gpus
    assert gpus["h200"].attention_rates == H200
    assert {name: gpu.peak_tflops for name, gpu in gpus.items()} == {name: PEAK_TFLOPS[name.upper()] for name in gpus}


def test_a_file_adds_and_changes_entries(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("gpus: {h200: {matmul_tflops: 700}}\nlinks: {slow: {gbytes: 1, efficiency: 1, latency_us: 9}}\n")
    tables = read_tables(file)
    assert tables.gpu("h200").matmul_tflops == 700
    assert tables.gpu("h200").memory_gib == read_tables().gpu("h200").memory_gib
    assert tables.links["slow"].seconds(2e9, 3) == pytest.approx(2 + 27e-6)
    assert tables.links["slow"].seconds(0, 3) == 0.0


@pytest.mark.parametrize(
    "text, said",
    [
        ("- 1", "must hold gpus, links, models"),
        ("gpu: {}", "gpu is none of them"),
        ("gpus: {mine: {memory_gib: 80}}", "gpus: mine: attention_backward_tflops is missing"),
        ("gpus: {h200: {memory: 80}}", "gpus: h200: memory is unknown"),
        ("gpus: {h200: {memory_gib: -1}}", "memory_gib: -1 must be a number above 0"),
        ("gpus: {h200: {memory_gib: }}", "memory_gib: None must be a number above 0"),
        ("gpus: {h200: {memory_gib: [80]}}", "memory_gib: [80] must be a number above 0"),
        ("gpus: {h200: {node_link: 3}}", "node_link: 3 must be a name"),
        ("gpus: {h200: {node_link: none}}", "gpu h200 names the link none"),
        ("links: {a: {gbytes: fast, efficiency: 1, latency_us: 1}}", "gbytes: 'fast' must be a number above 0"),
        ("{", "--tables"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="--tables") as refused:
        read_tables(file)
    assert said in str(refused.value)


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="--gpu mi300 is in no table; use h200, h100, a100"):
        read_tables().gpu("mi300")
