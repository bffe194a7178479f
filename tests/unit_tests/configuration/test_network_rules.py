# SPDX-License-Identifier: Apache-2.0
"""Weights go into the network that they were trained in, by whichever flag they come."""

import dataclasses
from argparse import Namespace
from typing import Any

import pytest
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import transformer_config
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_csbp.configuration.network_rules import check_network, settings_of_network
from tests.unit_tests.configuration.support import FLAGS, arguments

SOURCE = "--load folder"
BEFORE = arguments()


def check(flags: str = "", resumed: bool = False, saved: Namespace = BEFORE, **changes: Any) -> list[str]:
    return check_network(arguments(flags, **changes), saved, SOURCE, resumed, FLAGS)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    "flags, changes, message",
    [
        ("--hidden-size 128", {}, "--hidden-size 128 differs from 64 in .* Use --hidden-size 64."),
        ("--num-layers 3", {}, "--num-layers 3 differs from 2"),
        ("--num-query-groups 1", {}, "--num-query-groups 1 differs from 2"),
        ("--add-qkv-bias", {}, "--add-qkv-bias is given and was not in .* Leave out --add-qkv-bias."),
        ("--qk-layernorm", {}, "--qk-layernorm is given and was not"),
        ("--attention-output-gate", {}, "--attention-output-gate is given and was not"),
        ("--normalization LayerNorm", {}, "--normalization LayerNorm differs from RMSNorm"),
        ("--untie-embeddings-and-output-weights", {}, "--untie-embeddings-and-output-weights is given and was not"),
        ("--num-experts 4", {}, "--num-experts 4 is given and was not in .* Leave out --num-experts."),
        ("--position-embedding-type learned_absolute", {}, "--position-embedding-type learned_absolute differs"),
        ("", {"swiglu": False}, "--swiglu is not given and was in .* Add --swiglu."),
        ("", {"swiglu": False, "squared_relu": True}, "--squared-relu is given and was not and --swiglu is not given"),
        ("", {"add_bias_linear": True}, "--disable-bias-linear is not given and was"),
        ("--apply-layernorm-1p", {}, "--apply-layernorm-1p is given and was not"),
    ],
)
def test_another_network_is_refused(resumed: bool, flags: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as error:
        check(flags, resumed, **changes)
    assert "its weights do not fit this network" in str(error.value)
    assert "--load folder" in str(error.value)


def test_a_shared_expert_that_is_forgotten_is_refused() -> None:
    experts = "--num-experts 4 --moe-ffn-hidden-size 32"
    saved = arguments(f"{experts} --moe-shared-expert-intermediate-size 32")
    with pytest.raises(ValueError, match="Add --moe-shared-expert-intermediate-size 32"):
        check(experts, resumed=True, saved=saved)


@pytest.mark.parametrize(
    "flags, note",
    [
        ("--rotary-base 500000", "--rotary-base 500000 differs from 10000"),
        ("--rotary-percent 0.5", "--rotary-percent 0.5 differs from 1.0"),
        ("--norm-epsilon 1e-6", "--norm-epsilon 1e-06 differs from 1e-05"),
        ("--position-embedding-type yarn", "--position-embedding-type yarn differs from rope"),
    ],
)
def test_positions_and_numbers_may_change_in_a_new_run_and_are_said(flags: str, note: str) -> None:
    assert check(flags) == [note]
    with pytest.raises(ValueError, match=r"or --finetune to start a new run from these weights\.$"):
        check(flags, resumed=True)


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--bf16 --hidden-dropout 0.2 --transformer-impl local --no-rope-fusion",
        "--max-position-embeddings 128 --make-vocab-size-divisible-by 64",
        "--pipeline-model-parallel-size 2 --moe-token-dispatcher-type alltoall --init-method-std 0.1",
    ],
)
def test_how_a_network_is_computed_may_change(flags: str) -> None:
    assert check(flags, resumed=True) == []


def test_heads_without_groups_are_compared_as_they_take_effect() -> None:
    """Megatron writes the number of heads over `num_query_groups` in the course of a run, and saves that."""
    saved = arguments(group_query_attention=False, num_query_groups=4)
    assert check(saved=saved, resumed=True, group_query_attention=False, num_query_groups=1) == []
    with pytest.raises(ValueError, match="--group-query-attention is given and was not"):
        check(saved=saved)


def test_what_an_older_megatron_did_not_save_is_not_compared() -> None:
    saved = arguments()
    del saved.attention_output_gate, saved.add_qkv_bias
    assert check("--attention-output-gate", saved=saved) == []


def test_a_setting_that_a_later_megatron_adds_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to name it here."""
    later = dataclasses.make_dataclass("Later", [("new_gate", bool, False)], bases=(TransformerConfig,))
    monkeypatch.setattr(transformer_config, "TransformerConfig", later)
    assert settings_of_network(arguments(new_gate=True))["new_gate"] is True
    with pytest.raises(ValueError, match="--new-gate is given and was not"):
        check(saved=arguments(new_gate=False), resumed=True, new_gate=True)


def test_most_of_the_architecture_is_compared() -> None:
    """The expression that leaves fields out must not leave out more than it says."""
    names = [field.name for field in dataclasses.fields(TransformerConfig)]
    end = names.index("no_rope_freq")
    parallel = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    architecture = [name for name in names[:end] if name not in parallel]
    compared = set(settings_of_network(arguments()))
    assert {name for name in architecture if name not in compared} <= {
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "attention_backend"),
        *("flash_attention_version", "hidden_dropout", "attention_dropout", "qk_clip", "qk_clip_alpha", "test_mode"),
        *("qk_clip_threshold", "log_max_attention_logit", "calculate_per_token_loss", "mtp_loss_scaling_factor"),
        *("activation_func_fp8_input_store", "softmax_scale"),  # no flag sets the latter
    }
