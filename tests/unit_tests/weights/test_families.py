# SPDX-License-Identifier: Apache-2.0
"""The tables of tensors: published sizes, names, keys; and layouts, bit for bit."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_csbp.weights.families import FAMILIES, Family, family_of
from megatron_csbp.weights.layouts import GATED_QKV, GROUPED_QKV, LESS_ONE, STACKED, VOCABULARY, rounded_entries
from megatron_csbp.weights.model_arguments import arguments_from_config
from megatron_csbp.weights.model_shape import ModelShape, shape_from_arguments
from megatron_csbp.weights.rules import Piece, pieces, state_keys

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
QWEN3_MOE = QWEN3 | {"model_type": "qwen3_moe", "num_key_value_heads": 4}
QWEN3_5_27B = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
}
"""Qwen3.8-27B has the same settings."""
NEMOTRON = QWEN3 | {"model_type": "nemotron_labs_diffusion", "vocab_size": 131_072}


def sizes(layers: int, hidden: int, ffn: int, heads: int, **more: object) -> dict[str, object]:
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
    }
    return config | {"max_position_embeddings": 40_960, "rope_theta": 1e6} | more


EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
PUBLISHED = {
    "Qwen3-0.6B": (QWEN3 | sizes(28, 1024, 3072, 16, tie_word_embeddings=True), 596_049_920),
    "Qwen3-1.7B": (QWEN3 | sizes(28, 2048, 6144, 16, tie_word_embeddings=True), 1_720_574_976),
    "Qwen3-4B": (QWEN3 | sizes(36, 2560, 9728, 32, tie_word_embeddings=True), 4_022_468_096),
    "Qwen3-8B": (QWEN3 | sizes(36, 4096, 12_288, 32), 8_190_735_360),
    "Qwen3-14B": (QWEN3 | sizes(40, 5120, 17_408, 40), 14_768_307_200),
    "Qwen3-32B": (QWEN3 | sizes(64, 5120, 25_600, 64), 32_762_123_264),
    "Qwen3-30B-A3B": (QWEN3_MOE | sizes(48, 2048, 6144, 32) | EXPERTS, 30_532_122_624),
}


def model_of(config: dict[str, object]) -> tuple[Family, ModelShape]:
    family = family_of(config, "here")
    return family, shape_from_arguments(
        arguments_from_config(family.config, config, 8), int(str(config["vocab_size"]))
    )


def pieces_of(config: dict[str, object]) -> list[Piece]:
    family, shape = model_of(config)
    return list(pieces(family.rules, family.body, shape))


def parameters_of(config: dict[str, object]) -> int:
    return sum(math.prod(shape) for piece in pieces_of(config) for shape in piece.part_shapes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_has_as_many_parameters_as_the_published_model(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert parameters_of(config) == parameters


def test_qwen_3_5_27b_has_the_published_parameters_but_for_vision_and_multi_token_prediction() -> None:
    """27.781 billion are published, with both."""
    hidden, ffn, wide = 5120, 17_408, 1152
    attention = 3 * hidden * 6144 + 2 * hidden * 1024
    multi_token = 2 * hidden * hidden + attention + 3 * hidden * ffn
    merger = 4 * wide * 4 * wide + 4 * wide * hidden
    vision = 27 * (4 * wide * wide + 2 * wide * 4304) + merger + wide * 3 * 2 * 16 * 16 + 2304 * wide
    text = parameters_of(QWEN3_5_27B)
    assert text == 26_895_998_464
    assert (text + multi_token + vision) / 1e9 == pytest.approx(27.781, abs=0.001)  # without biases and some norms


@pytest.mark.parametrize("name", PUBLISHED)
def test_pieces_cover_every_element_of_every_key_once(name: str) -> None:
    """Dims of layer and expert are the only ones that are cut."""
    covered: dict[str, int] = {}
    places = set()
    for piece in pieces_of(PUBLISHED[name][0]):
        for key in piece.keys:
            covered[key] = covered.get(key, 0) + math.prod(piece.shape)
            assert (key, piece.offset) not in places
            places.add((key, piece.offset))
    whole = {key: math.prod(piece.global_shape) for piece in pieces_of(PUBLISHED[name][0]) for key in piece.keys}
    assert covered == whole


def test_no_tensor_of_hugging_face_is_used_twice() -> None:
    names = [name for piece in pieces_of(PUBLISHED["Qwen3-30B-A3B"][0]) for name in piece.names]
    assert len(names) == len(set(names))


def test_every_row_of_a_tensor_that_goes_into_several_is_used_once() -> None:
    """Projection and convolution of gated delta nets, which Megatron keeps as queries, keys and values."""
    rows: dict[str, list[tuple[int, int]]] = {}
    wholes: dict[str, int] = {}
    for piece in pieces_of(QWEN3_5_27B):
        for part in piece.parts:
            rows.setdefault(part.name, []).append((part.first_row, part.first_row + part.shape[0]))
            wholes[part.name] = part.whole[0]
            assert part.shape[1:] == part.whole[1:]
    for name, spans in rows.items():
        assert sorted(start for start, _ in spans) == sorted([0, *(stop for _, stop in spans)])[:-1], name
        assert max(stop for _, stop in spans) == wholes[name]
    divided = {name.rpartition("linear_attn.")[2] for name, spans in rows.items() if len(spans) > 1}
    assert divided == {"in_proj_qkv.weight", "conv1d.weight"}


def test_layers_are_gated_delta_nets_or_full_attention() -> None:
    keys = {key: piece.global_shape for piece in pieces_of(QWEN3_5_27B) for key in piece.keys}
    assert keys["decoder.layers.2.self_attention.in_proj.weight.value"] == (6144, 5120)
    assert keys["decoder.layers.2.self_attention.conv1d.weight.key"] == (2048, 1, 4)
    assert keys["decoder.layers.3.self_attention.linear_qkv.weight"] == (2 * 6144 + 2 * 1024, 5120)
    assert "decoder.layers.3.self_attention.in_proj.weight.z" not in keys
    assert "decoder.layers.2.self_attention.q_layernorm.weight" not in keys


def test_nemotron_labs_diffusion_has_its_own_names_and_no_query_norms() -> None:
    config = NEMOTRON | sizes(34, 4096, 14_336, 32)
    names = {name for piece in pieces_of(config) for name in piece.names}
    assert {"encoder.embed_tokens.weight", "encoder.norm.weight", "diffusion_head.weight"} <= names
    assert "encoder.layers.33.self_attn.q_proj.weight" in names
    assert not [name for name in names if "q_norm" in name or name.startswith("model.")]


def test_layers_that_differ_have_keys_of_their_own() -> None:
    config = QWEN3_MOE | sizes(3, 64, 96, 4) | EXPERTS | {"num_experts": 2, "mlp_only_layers": [1]}
    keys = {key: piece.global_shape for piece in pieces_of(config) for key in piece.keys}
    assert keys["decoder.layers.1.mlp.linear_fc1.weight"] == (192, 64)
    assert keys["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"] == (2, 1536, 64)
    assert "decoder.layers.1.mlp.router.weight" not in keys
    assert not [key for key in keys if key.startswith("decoder.layers.self_attention")]
    family, shape = model_of(config)
    states = set(state_keys(family.states, shape))
    assert "decoder.layers.2.mlp.experts.experts.linear_fc1._extra_state/shard_1_2" in states
    assert "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1" in states


def test_extra_states_are_numbered_as_megatron_does() -> None:
    family, shape = model_of(QWEN3_MOE | sizes(3, 64, 96, 4) | EXPERTS | {"num_experts": 2})
    states = set(state_keys(family.states, shape))
    assert "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_2.1_3.2" in states
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3" in states
    assert "decoder.final_layernorm._extra_state/shard_0_1" in states


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'llama', which has no table here\. Known are qwen3 \(Qwen3 0\.6B to 32B\)"):
        family_of({"model_type": "llama"}, "--from x")
    assert all(name == family.model_type for name, family in FAMILIES.items())


def small_shape(groups: int, queries_each: int, head: int, padded: int = 8) -> ModelShape:
    dims = {"keys": groups * head, "queries": groups * queries_each * head, "head": head, "padded_vocab": padded}
    return ModelShape(dims, (), False)


@given(groups=st.integers(1, 5), queries_each=st.integers(1, 4), head=st.integers(1, 4))
def test_query_key_value_rows_lie_by_key_head(groups: int, queries_each: int, head: int) -> None:
    """Against a loop over heads, and back."""
    shape = small_shape(groups, queries_each, head)
    numbers = iter(range(10_000))

    def rows(heads: int) -> Tensor:
        return torch.tensor([[next(numbers)] * 3 for _ in range(heads * head)])

    q, k, v = rows(groups * queries_each), rows(groups), rows(groups)
    expected = []
    for group in range(groups):
        expected.append(q[group * queries_each * head : (group + 1) * queries_each * head])
        expected += [part[group * head : (group + 1) * head] for part in (k, v)]
    packed = GROUPED_QKV.pack([q, k, v], shape)
    assert packed.equal(torch.cat(expected))
    again = GROUPED_QKV.unpack(packed, [tuple(part.shape) for part in (q, k, v)], shape)
    assert all(found.equal(part) for found, part in zip(again, (q, k, v), strict=True))


@given(groups=st.integers(1, 4), queries_each=st.integers(1, 4), head=st.integers(1, 4))
def test_gates_lie_behind_the_queries_of_their_key_head(groups: int, queries_each: int, head: int) -> None:
    """Hugging Face has a gate behind each query head. Against a loop over heads, and back."""
    shape = small_shape(groups, queries_each, head)
    heads = groups * queries_each
    numbers = torch.arange((2 * heads + 2 * groups) * head)[:, None].expand(-1, 3)
    q, k, v = numbers.split([2 * heads * head, groups * head, groups * head])
    expected = []
    for group in range(groups):
        own = [2 * (group * queries_each + query) * head for query in range(queries_each)]
        expected += [q[first : first + head] for first in own]
        expected += [q[first + head : first + 2 * head] for first in own]
        expected += [part[group * head : (group + 1) * head] for part in (k, v)]
    packed = GATED_QKV.pack([q, k, v], shape)
    assert packed.equal(torch.cat(expected))
    again = GATED_QKV.unpack(packed, [tuple(part.shape) for part in (q, k, v)], shape)
    assert all(found.equal(part) for found, part in zip(again, (q, k, v), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_less_one_comes_back_unless_it_is_small(dtype: torch.dtype) -> None:
    shape = small_shape(1, 1, 1)
    weight = torch.cat([torch.linspace(0.5, 9, 999), torch.tensor([0.25, 0.0])]).to(dtype)
    (again,) = LESS_ONE.unpack(LESS_ONE.pack([weight], shape).to(dtype), [(1001,)], shape)
    assert again.to(dtype).equal(weight)
    assert rounded_entries(weight, dtype) == 0
    small = torch.tensor([0.1, -0.7, 0.01, 1.3]).to(dtype)
    assert rounded_entries(small, dtype) == 3
    assert rounded_entries(small, torch.float64) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_give_back_every_bit(dtype: torch.dtype) -> None:
    shape = small_shape(2, 2, 2, padded=8)
    gate, up, rows = (torch.randn(size, 4).to(dtype) for size in (6, 6, 5))
    rows[0, 0] = torch.nan
    packers: list[tuple[Callable[..., Tensor], Callable[..., list[Tensor]], list[Tensor]]] = [
        (STACKED.pack, STACKED.unpack, [gate, up]),
        (VOCABULARY.pack, VOCABULARY.unpack, [rows]),
    ]
    for pack, unpack, parts in packers:
        again = unpack(pack(parts, shape), [tuple(part.shape) for part in parts], shape)
        for found, part in zip(again, parts, strict=True):
            assert found.contiguous().view(torch.uint8).equal(part.view(torch.uint8))
    assert VOCABULARY.pack([rows], shape)[5:].eq(0).all()
