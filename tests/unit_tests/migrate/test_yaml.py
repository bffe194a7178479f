# SPDX-License-Identifier: Apache-2.0
"""YAML files of settings: Megatron's own kind, with sections, and what the new file has to be."""

from argparse import ArgumentParser
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_csbp.arguments import add_arguments
from megatron_csbp.configuration.config_file import set_defaults_from_yaml
from megatron_csbp.migrate.edits import Migration
from megatron_csbp.migrate.rules import FlagRules, Wanted
from megatron_csbp.migrate.yaml_file import looks_like_yaml, migrate_yaml
from tests.support.megatron_arguments import parser

SETTINGS = """# a small model
language_model:
  num_layers: 24
  activation_func: swiglu   # not a flag
  gated_linear_unit: True
  init_method: null
model_parallel:
  context_parallel_size: 4
  sequence_parallel: True
seq_length: 4096
swiglu: True
attention_dropout: 0.1
rampup_batch_size: [32, 32, 1000]
bf16: true
ckpt_format: torch
use_legacy_models: False
"""


def migrate(text: str, wanted: Wanted | None = None) -> Migration:
    return migrate_yaml("job.yaml", text, FlagRules(parser()), wanted or Wanted(mask_token=190))


def test_a_file_of_settings_becomes_one_that_the_entry_reads(tmp_path: Path) -> None:
    migration = migrate(SETTINGS)
    assert migration.obstacles == []
    file = tmp_path / "job.yaml"
    file.write_text(migration.after)
    reader = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(reader)
    set_defaults_from_yaml(add_arguments(reader), file)
    args = reader.parse_args([])
    assert (args.context_parallel_size, args.block_parallel_size, args.diffusion_block_size) == (4, 4, 32)
    assert (args.mask_token_id, args.num_layers, args.swiglu, args.bf16) == (190, 24, True, True)
    assert args.ckpt_format == "torch_dist"


def test_each_key_that_goes_has_its_reason() -> None:
    reasons = "\n".join(edit.reason for edit in migrate(SETTINGS).edits)
    for said in (
        "gated_linear_unit: True is left out: no flag; activation_func says it",
        "init_method: None is left out: no flag of Megatron-Core 0.19, and it sets nothing",
        "attention_dropout: 0.1 is left out: the tiles of a row",
        "rampup_batch_size: [32, 32, 1000] is left out: not supported with block diffusion",
        "ckpt_format: torch -> torch_dist:",
    ):
        assert said in reasons


def test_a_key_that_sets_something_and_is_no_flag_stands_in_the_way() -> None:
    (obstacle,) = migrate("num_layers: 2\nfancy_option: 7\n").obstacles
    assert obstacle.startswith("line 2: fancy_option: 7: no flag of Megatron-Core 0.19 stands for it")


def test_a_context_size_is_added_or_replaced() -> None:
    assert migrate("num_layers: 2", Wanted(context=8)).after == (
        "num_layers: 2\ncontext-parallel-size: 8\nbp-size: 8\ndiffusion-block-size: 32\nmask-token-id: MASK_TOKEN_ID\n"
    )
    assert "context_parallel_size: 8\n" in migrate(SETTINGS, Wanted(context=8)).after


def test_a_length_that_does_not_fit_is_told() -> None:
    (obstacle,) = migrate("seq_length: 1000\ncontext_parallel_size: 2\n").obstacles
    assert obstacle == "--seq-length 1000 must be a multiple of 2 x 2 ranks x block size 32 = 128: use 896 or 1024"


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [1\n", "just words"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"job\.yaml"):
        migrate(text)


def test_yaml_is_known_by_its_name_or_its_first_line() -> None:
    assert looks_like_yaml("a.yml", "")
    assert looks_like_yaml("settings", "# words\nnum_layers: 2\n")
    assert not looks_like_yaml("job.sh", "#!/bin/bash\nexport A=1\n")
    assert not looks_like_yaml("flags", "--num-layers 2\n")
