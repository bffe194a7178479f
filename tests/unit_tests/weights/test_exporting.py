# SPDX-License-Identifier: Apache-2.0
"""A run's arguments are held against the config.json that goes along with its export."""

from typing import Any

import pytest

from megatron_csbp.weights.exporting import changed_config
from megatron_csbp.weights.families import NEMOTRON_LABS_DIFFUSION, QWEN3, QWEN3_5_TEXT, QWEN3_MOE
from megatron_csbp.weights.model_arguments import Arguments, arguments_from_config
from tests.unit_tests.weights.test_model_arguments import DENSE, EXPERTS, LINEAR, YARN


def trained(**change: object) -> Arguments:
    return arguments_from_config(QWEN3.config, DENSE, 8) | change


def changed(arguments: Arguments, config: dict[str, Any] = DENSE) -> dict[str, Any]:
    return changed_config(QWEN3, config, arguments, "--load run", "--like model")


def test_an_unchanged_model_changes_nothing() -> None:
    assert changed(trained()) == {}
    assert changed(trained(hidden_dropout=0.1, mask_token_id=189)) == {}


def test_positions_are_written_as_they_were_trained() -> None:
    longer = arguments_from_config(QWEN3.config, DENSE | {"rope_parameters": YARN, "max_position_embeddings": 512}, 8)
    assert changed(trained() | longer) == {"max_position_embeddings": 512, "rope_parameters": YARN}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_layers": 4}, "num_layers is 4 and there 3"),
        ({"qk_layernorm": False}, "qk_layernorm is False and there True"),
        ({"layernorm_epsilon": 1e-5}, "layernorm_epsilon is 1e-05 and there 1e-06"),
        ({"untie_embeddings_and_output_weights": True}, "untie_embeddings_and_output_weights is True and there False"),
        ({"padded_vocab_size": 128}, "the vocabulary has 128 rows and there 190"),
        ({"mask_token_id": 190}, "the mask token 190 would be lost with the rows beyond the 190 there"),
    ],
)
def test_another_model_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="--load run is not a model like --like model: " + said):
        changed(trained(**change))


def test_a_router_that_normalises_otherwise_is_refused() -> None:
    arguments = arguments_from_config(QWEN3_MOE.config, DENSE | EXPERTS, 8) | {"moe_aux_loss_coeff": [0.5]}
    assert changed_config(QWEN3_MOE, DENSE | EXPERTS, arguments, "a", "b") == {}
    with pytest.raises(ValueError, match="moe_router_pre_softmax is False and there True"):
        changed_config(QWEN3_MOE, DENSE | EXPERTS | {"norm_topk_prob": False}, arguments, "a", "b")


def test_a_model_without_grouped_heads_says_so_in_either_way() -> None:
    config = DENSE | {"num_key_value_heads": 4}
    arguments = arguments_from_config(QWEN3.config, config, 8) | {
        "group_query_attention": False,
        "num_query_groups": 1,
    }
    assert changed(arguments, config) == {}


def test_nemotrons_head_is_its_own_whatever_the_config_says() -> None:
    config = DENSE | {"rope_parameters": YARN}
    arguments = arguments_from_config(NEMOTRON_LABS_DIFFUSION.config, config, 8)
    arguments["untie_embeddings_and_output_weights"] = True
    assert changed_config(NEMOTRON_LABS_DIFFUSION, config, arguments, "a", "b") == {}


def test_changed_positions_of_qwen_3_5_keep_what_is_said_of_pictures() -> None:
    pictures = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = DENSE | LINEAR | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7} | pictures}
    arguments = arguments_from_config(QWEN3_5_TEXT.config, config, 8)
    assert changed_config(QWEN3_5_TEXT, config, arguments, "a", "b") == {}
    longer = changed_config(QWEN3_5_TEXT, config, arguments | {"rotary_base": 20_000_000}, "a", "b")
    plain = {"rope_type": "default", "rope_theta": 2e7, "partial_rotary_factor": 0.25}
    assert longer == {"rope_parameters": plain | pictures}
