# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is looked at as the model that was trained: no flag of it has to be repeated."""

import pytest

from megatron_csbp.configuration import checkpoint_defaults
from megatron_csbp.configuration.checkpoint_defaults import set_defaults_from_checkpoint
from megatron_csbp.configuration.network_rules import settings_of_network
from tests.support.megatron_arguments import parser
from tests.unit_tests.configuration.support import arguments


@pytest.mark.parametrize("names", ["_BESIDE_THE_CONFIG", "_VOCABULARY", "_OBJECTIVE"])
def test_what_is_taken_from_a_checkpoint_are_arguments_that_exist(names: str) -> None:
    known = {action.dest for action in parser()._actions}
    assert [name for name in getattr(checkpoint_defaults, names).split() if name not in known] == []


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--window-size 14,0 --window-attn-skip-freq 4 --window-anchor block",
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-key-head-dim 32 "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-conv-kernel-dim 3",
        "--num-experts 4 --moe-shared-expert-intermediate-size 32 --moe-latent-size 16",
        "--position-embedding-type yarn --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 32",
        "--corrupted-views 3 --no-rope-freq 2 --qk-layernorm --norm-epsilon 1e-6",
    ],
)
def test_a_command_without_model_flags_gets_the_network_and_the_mask_of_the_checkpoint(flags: str) -> None:
    saved = arguments(flags)
    others = parser.__wrapped__()  # not the one that all tests share: its defaults change
    set_defaults_from_checkpoint(others, saved)
    found = others.parse_args([])
    for name in ("world_size", "rank", "params_dtype", "padded_vocab_size"):
        setattr(found, name, getattr(saved, name))
    assert settings_of_network(found) == settings_of_network(saved)
    assert found.window_anchor == saved.window_anchor
    assert found.corrupted_views == saved.corrupted_views
