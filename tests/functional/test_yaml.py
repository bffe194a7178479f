# SPDX-License-Identifier: Apache-2.0
"""A run from a YAML file is the run that its flags describe."""

from pathlib import Path

import yaml

from tests.functional.model_flags import CSBP2, NEMOTRON, TIED, iterations
from tests.support.megatron_run import Ranks


def as_yaml(arguments: list[str]) -> str:
    """Write a command line as a YAML file: values without quotes where YAML reads a number."""
    values: dict[str, object] = {}
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if word.startswith("--"):
            values[word[2:]] = True if following.startswith("--") else yaml.safe_load(following)
    return yaml.safe_dump(values)


def test_a_run_from_a_file_is_the_same_run(ranks: Ranks, tmp_path: Path) -> None:
    arguments = [*TIED, *NEMOTRON, *CSBP2, *iterations(3, evaluate=True)]
    (tmp_path / "run.yaml").write_text(as_yaml([*arguments, "--diffusion-loss-weight", "0.7"]))
    typed = ranks.train([*arguments, "--diffusion-loss-weight", "0.5"], 2).check()
    # The command line wins over the file.
    read = ranks.train(["--yaml-cfg", str(tmp_path / "run.yaml"), "--diffusion-loss-weight", "0.5"], 2).check()
    assert len(typed.losses()) == 3
    assert read.records == typed.records
