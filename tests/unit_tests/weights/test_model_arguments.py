# SPDX-License-Identifier: Apache-2.0
"""config.json and Megatron's arguments, there and back; and the flags of the YAML file."""

from typing import Any

import pytest
import yaml

from megatron_csbp.weights.families import MINISTRAL3, QWEN3, QWEN3_5, QWEN3_5_TEXT, QWEN3_MOE
from megatron_csbp.weights.model_arguments import ConfigTable, arguments_from_config, config_from_arguments
from megatron_csbp.weights.model_flags import flags_of_arguments, yaml_text

DENSE = {
    "vocab_size": 190,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e9,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize(
    "table, config",
    [
        (QWEN3.config, DENSE),
        (QWEN3_MOE.config, DENSE | EXPERTS | {"tie_word_embeddings": False}),
        (MINISTRAL3.config, DENSE | {"rope_parameters": YARN, "rms_norm_eps": 1e-5}),
        (QWEN3_5_TEXT.config, DENSE | LINEAR),
    ],
    ids=["qwen3", "qwen3-moe", "ministral3", "qwen3.5"],
)
def test_a_config_comes_back_from_its_arguments(table: ConfigTable, config: dict[str, Any]) -> None:
    again = config_from_arguments(table, arguments_from_config(table, config, 8), config["vocab_size"])
    assert {key: again[key] for key in config} == config


def test_old_files_say_the_same_as_new_ones() -> None:
    old = {key: value for key, value in DENSE.items() if key != "rope_parameters"}
    old |= {"rope_theta": 1e9, "rope_scaling": {**YARN, "type": "yarn"}}
    new = DENSE | {"rope_parameters": YARN}
    assert arguments_from_config(QWEN3.config, old, 8) == arguments_from_config(QWEN3.config, new, 8)
    assert arguments_from_config(QWEN3_MOE.config, DENSE | EXPERTS, 8) == arguments_from_config(
        QWEN3_MOE.config,
        DENSE | {key: value for key, value in EXPERTS.items() if key != "num_experts"} | {"num_local_experts": 4},
        8,
    )


def test_yarn_scales_as_transformers_does() -> None:
    """Without both mscales, the factor alone decides; that is Megatron's 1 and 0."""
    plain = {key: value for key, value in YARN.items() if not key.startswith("mscale")}
    arguments = arguments_from_config(QWEN3.config, DENSE | {"rope_parameters": plain}, 8)
    assert (arguments["mscale"], arguments["mscale_all_dim"]) == (1.0, 0.0)
    assert arguments["query_scale_beta"] == 0.1


@pytest.mark.parametrize(
    "layers, frequency",
    [("LLFLLF", 3), ("LLFL", 3), ("FFF", 1), ("LFFL", [1, 0, 0, 1]), ("LL", [1, 1])],
)
def test_layer_types_are_a_frequency_where_they_are_regular(layers: str, frequency: int | list[int]) -> None:
    kinds = ["linear_attention" if kind == "L" else "full_attention" for kind in layers]
    config = DENSE | LINEAR | {"num_hidden_layers": len(kinds), "layer_types": kinds}
    arguments = arguments_from_config(QWEN3_5_TEXT.config, config, 8)
    assert arguments["linear_attention_freq"] == frequency
    assert config_from_arguments(QWEN3_5_TEXT.config, arguments, 190)["layer_types"] == kinds


def test_what_a_config_of_qwen_3_5_leaves_out() -> None:
    config = {key: value for key, value in (DENSE | LINEAR).items() if key != "layer_types"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]}
    arguments = arguments_from_config(QWEN3_5_TEXT.config, config, 8)
    assert (arguments["linear_attention_freq"], arguments["rotary_percent"]) == (4, 0.25)
    assert flags_of_arguments(arguments | {"linear_attention_freq": [1, 0]})["linear-attention-freq"] == "[1,0]"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid' and must be 'swish' or 'silu'"),
        ({"attn_output_gate": False}, "attn_output_gate is False and must be True"),
        ({"layer_types": ["sliding_attention"] * 3}, r"3 entries for 3 layers, with \['sliding_attention'\]"),
        ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ({"linear_num_key_heads": None}, "no linear_num_key_heads"),
    ],
)
def test_a_hybrid_that_megatron_does_not_have_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        arguments_from_config(QWEN3_5_TEXT.config, DENSE | LINEAR | change, 8)


def test_the_text_model_in_a_larger_one_has_a_config_of_its_own() -> None:
    text = DENSE | LINEAR | {"model_type": "qwen3_5_text"}
    del text["tie_word_embeddings"]
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    alone = QWEN3_5.of_text_alone(whole)
    named = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "tie_word_embeddings": True}
    assert alone == text | named
    assert QWEN3_5_TEXT.of_text_alone(alone) is alone
    with pytest.raises(ValueError, match="of a qwen3_5 has no text_config"):
        QWEN3_5.of_text_alone({"model_type": "qwen3_5"})


@pytest.mark.parametrize(
    "change, said",
    [
        ({"use_sliding_window": True}, "use_sliding_window is True and must be False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' and must be 'silu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope_type 'llama3'"),
        ({"rope_parameters": {**YARN, "attention_factor": 2.0}}, "YaRN entries attention_factor"),
        ({"rope_parameters": {"rope_theta": 1.5}}, "rope_theta 1.5 in config.json must be a whole number"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
    ],
)
def test_a_setting_that_megatron_does_not_have_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        arguments_from_config(QWEN3.config, DENSE | change, 8)


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    padded = {by: arguments_from_config(QWEN3.config, DENSE, by)["padded_vocab_size"] for by in (1, 8, 128)}
    assert padded == {1: 190, 8: 192, 128: 256}


def test_the_yaml_file_has_flags() -> None:
    arguments = arguments_from_config(QWEN3_MOE.config, DENSE | EXPERTS, 8)
    text = yaml_text("A line.\nAnother.", {"model": flags_of_arguments(arguments), "tokenizer": {}})
    assert text.startswith("# A line.\n# Another.\nmodel:\n")
    flags = yaml.safe_load(text)["model"]
    assert flags["norm-epsilon"] == 1e-6
    assert flags["disable-bias-linear"] is True
    assert flags["moe-layer-freq"] == "[1,0,1]"
    assert "add-bias-linear" not in flags
    assert "untie-embeddings-and-output-weights" not in flags  # false: the flag is not given
