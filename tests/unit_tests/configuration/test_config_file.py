# SPDX-License-Identifier: Apache-2.0
"""`--yaml-cfg`: what is in the file counts as if it had been typed, and the command line wins over it."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_csbp.configuration.config_file import flags_given, set_defaults_from_yaml, take_yaml_flag
from tests.support.megatron_arguments import parser


class Parsed:
    """A YAML file, then a command line, through Megatron's parser."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.yaml"
        self.given: set[str] = set()

    def __call__(self, text: str, command_line: str = "") -> Namespace:
        self.path.write_text(text)
        self.given = set_defaults_from_yaml(parser(), self.path)
        return parser().parse_args(command_line.split())


@pytest.fixture
def parsed(tmp_path: Path) -> Iterator[Parsed]:
    """Build Megatron's parser once, and give it its defaults back after each test."""
    before = {action: (action.default, action.required) for action in parser()._actions}
    yield Parsed(tmp_path)
    for action, (default, required) in before.items():
        action.default, action.required = default, required
    parser()._defaults.clear()


@pytest.mark.parametrize(
    "line, name, value",
    [
        ("seq-length: 64", "seq_length", 64),
        ("seq_length: 64", "seq_length", 64),
        ("--seq-length: 64", "seq_length", 64),
        ("bp-size: 2", "block_parallel_size", 2),
        ("block_parallel_size: 2", "block_parallel_size", 2),
        ("lr: 1e-3", "lr", 1e-3),
        ("lr: 0.001", "lr", 1e-3),
        ("swiglu: true", "swiglu", True),
        ("swiglu: false", "swiglu", False),
        ("no-persist-layer-norm: true", "no_persist_layer_norm", True),
        ("disable-bias-linear: true", "add_bias_linear", False),
        ("disable-bias-linear: false", "add_bias_linear", True),
        ("add_bias_linear: false", "add_bias_linear", False),
        ("rl-persist-cuda-graphs: true", "rl_persist_cuda_graphs", True),
        ("rl-persist-cuda-graphs: false", "rl_persist_cuda_graphs", False),
        ("no-rl-persist-cuda-graphs: true", "rl_persist_cuda_graphs", False),
        ("data-path: [0.5, a, 0.5, b]", "data_path", ["0.5", "a", "0.5", "b"]),
        ("data-path: 0.5 a 0.5 b", "data_path", ["0.5", "a", "0.5", "b"]),
        ("data-path: only", "data_path", ["only"]),
        ("split: 90,5,5", "split", "90,5,5"),
        ("load: 5", "load", "5"),
        ("load: null", "load", None),
        ("diffusion-objective: nemotron", "diffusion_objective", "nemotron"),
        ("num_moe_experts: 4", "num_experts", 4),
        ("activation_func: swiglu", "swiglu", True),
        ("language_model:\n  hidden_size: 32", "hidden_size", 32),
    ],
)
def test_a_line_says_what_its_flag_says(parsed: Parsed, line: str, name: str, value: object) -> None:
    found = getattr(parsed(line), name)
    assert found == value
    assert type(found) is type(value)


def test_the_command_line_wins(parsed: Parsed) -> None:
    args = parsed("seq-length: 64\nbp-size: 2\ndata-path: [a]", "--seq-length 128 --data-path b c")
    assert (args.seq_length, args.block_parallel_size, args.data_path) == (128, 2, ["b", "c"])


def test_flags_of_the_file_count_as_given(parsed: Parsed) -> None:
    parsed("attention_dropout: 0.1\nbp_size: 2")
    assert {"--attention-dropout", "--bp-size", "--block-parallel-size"} <= parsed.given
    assert "--hidden-dropout" not in parsed.given


@pytest.mark.parametrize(
    "text, said",
    [
        ("no-such-flag: 1", "'no-such-flag' is not a flag"),
        ("model:\n  no_such_flag: 1", "'no_such_flag' is not a flag"),
        ("seq-length: long", "seq-length: .*invalid int value: 'long'"),
        ("seq-length: 64.5", "invalid int value: '64.5'"),
        ("seq-length: [64, 128]", "must be one value"),
        ("seq-length: []", "must be one value"),
        ("swiglu: 1", "must be true or false"),
        ("swiglu: 'yes'", "must be true or false"),
        ("diffusion-objective: other", "invalid choice: 'other'"),
        ("hierarchical-context-parallel-sizes: []", "must be a list, not empty"),
        ("m:\n  seq-length: 64\nm:\n  seq-length: 32", "'m' comes twice"),
        ("bp-size: 2\nblock_parallel_size: 4", "'block_parallel_size' and 'bp-size' set the same flag"),
        ("- seq-length", "must hold `flag-name: value` lines"),
        ("seq-length: [", "expected the node content"),
    ],
)
def test_what_a_flag_would_not_take_is_an_argparse_error(
    parsed: Parsed, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed(text)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"--yaml-cfg {parsed.path}" in error
    assert re.search(said, error)


def test_a_missing_file_is_an_argparse_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        set_defaults_from_yaml(ArgumentParser(), tmp_path / "none.yaml")
    assert stop.value.code == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, path, rest",
    [
        (["--seq-length", "64"], None, ["--seq-length", "64"]),
        (["--yaml-cfg", "a.yaml", "--lr", "-1"], Path("a.yaml"), ["--lr", "-1"]),
        (["--lr=1", "--yaml-cfg=a.yaml", "-h"], Path("a.yaml"), ["--lr=1", "-h"]),
        (["--data-path", "a", "b", "--yaml-cfg", "c.yaml"], Path("c.yaml"), ["--data-path", "a", "b"]),
    ],
)
def test_the_flag_is_taken_out_of_the_command_line(argv: list[str], path: Path | None, rest: list[str]) -> None:
    assert take_yaml_flag(argv) == (path, rest)


def test_flags_are_named_without_their_values() -> None:
    assert flags_given(["--lr", "-1", "--seq-length=64", "-h"]) == {"--lr", "--seq-length"}
