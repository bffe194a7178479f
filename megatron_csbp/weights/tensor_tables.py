# SPDX-License-Identifier: Apache-2.0
"""The tensors of parts that families share: Megatron's keys, Hugging Face's names, and how one lies in the other.

Every rule that is for layers of one kind says so; a model without layers of that kind has none of its tensors.
"""

from megatron_csbp.weights.layouts import GATED_QKV, GROUPED_QKV, LESS_ONE, SAME, STACKED, VOCABULARY, Layout
from megatron_csbp.weights.model_shape import DELTA_NET, DENSE, EXPERTS, FULL_ATTENTION
from megatron_csbp.weights.rules import Part, Scope, StateRule, TensorRule

_LAYER = "{body}layers.{layer}."
_EXPERT = "{body}layers.{layer}.mlp.experts.{expert}."


def ends(head: str) -> tuple[TensorRule, ...]:
    """Return the tensors before and after the layers; `head` is the output layer's name."""
    return (
        TensorRule(
            "embedding.word_embeddings.weight",
            (Part("{body}embed_tokens.weight", "vocab hidden"),),
            VOCABULARY,
            Scope.MODEL,
        ),
        TensorRule("decoder.final_layernorm.weight", (Part("{body}norm.weight", "hidden"),), scope=Scope.MODEL),
        TensorRule("output_layer.weight", (Part(head, "vocab hidden"),), VOCABULARY, Scope.MODEL, untied_only=True),
    )


def _attention(query_dims: str, layout: Layout) -> tuple[TensorRule, ...]:
    """Return the tensors of full attention, apart from the norms of queries and keys."""
    return (
        TensorRule(
            "self_attention.linear_qkv.layer_norm_weight",
            (Part(_LAYER + "input_layernorm.weight", "hidden"),),
            kind=FULL_ATTENTION,
        ),
        TensorRule(
            "self_attention.linear_qkv.weight",
            (
                Part(_LAYER + "self_attn.q_proj.weight", query_dims),
                Part(_LAYER + "self_attn.k_proj.weight", "keys hidden"),
                Part(_LAYER + "self_attn.v_proj.weight", "keys hidden"),
            ),
            layout,
            kind=FULL_ATTENTION,
        ),
        TensorRule(
            "self_attention.linear_proj.weight",
            (Part(_LAYER + "self_attn.o_proj.weight", "hidden queries"),),
            kind=FULL_ATTENTION,
        ),
    )


ATTENTION = _attention("queries hidden", GROUPED_QKV)
GATED_ATTENTION = _attention("gated_queries hidden", GATED_QKV)
"""With an output gate, which Hugging Face keeps in the projection of the queries."""

QK_NORMS = (
    TensorRule(
        "self_attention.q_layernorm.weight",
        (Part(_LAYER + "self_attn.q_norm.weight", "head"),),
        kind=FULL_ATTENTION,
    ),
    TensorRule(
        "self_attention.k_layernorm.weight",
        (Part(_LAYER + "self_attn.k_norm.weight", "head"),),
        kind=FULL_ATTENTION,
    ),
)


def _delta(megatron: str, name: str, dims: str, layout: Layout = SAME) -> TensorRule:
    """Return a tensor that both sides have of a gated delta net."""
    return TensorRule(
        f"self_attention.{megatron}", (Part(f"{_LAYER}linear_attn.{name}", dims),), layout, kind=DELTA_NET
    )


def _delta_sections(megatron: str, name: str, inner: str) -> tuple[TensorRule, ...]:
    """Return the three of Megatron's tensors that are the rows of one of Hugging Face's; `inner`: its other dims."""
    sections = (
        ("query", "linear_keys", ""),
        ("key", "linear_keys", "linear_keys"),
        ("value", "linear_values", "linear_keys linear_keys"),
    )
    return tuple(
        TensorRule(
            f"self_attention.{megatron}.{section}",
            (Part(f"{_LAYER}linear_attn.{name}", f"{rows} {inner}", f"linear_channels {inner}", behind),),
            kind=DELTA_NET,
        )
        for section, rows, behind in sections
    )


DELTA_NETS = (
    TensorRule(
        "self_attention.in_proj.layer_norm_weight",
        (Part(_LAYER + "input_layernorm.weight", "hidden"),),
        kind=DELTA_NET,
    ),
    *_delta_sections("in_proj.weight", "in_proj_qkv.weight", "hidden"),
    _delta("in_proj.weight.z", "in_proj_z.weight", "linear_values hidden"),
    _delta("in_proj.weight.beta", "in_proj_b.weight", "linear_heads hidden"),
    _delta("in_proj.weight.alpha", "in_proj_a.weight", "linear_heads hidden"),
    *_delta_sections("conv1d.weight", "conv1d.weight", "one taps"),
    _delta("A_log", "A_log", "linear_heads"),
    _delta("dt_bias", "dt_bias", "linear_heads"),
    # Of these models' norms only this one is not zero-centred in Hugging Face's format.
    _delta("out_norm.weight", "norm.weight", "linear_value_head", LESS_ONE),
    _delta("out_proj.weight", "out_proj.weight", "hidden linear_values"),
)
DENSE_MLP = (
    TensorRule(
        "mlp.linear_fc1.layer_norm_weight",
        (Part(_LAYER + "post_attention_layernorm.weight", "hidden"),),
        kind=DENSE,
    ),
    TensorRule(
        "mlp.linear_fc1.weight",
        (
            Part(_LAYER + "mlp.gate_proj.weight", "ffn hidden"),
            Part(_LAYER + "mlp.up_proj.weight", "ffn hidden"),
        ),
        STACKED,
        kind=DENSE,
    ),
    TensorRule("mlp.linear_fc2.weight", (Part(_LAYER + "mlp.down_proj.weight", "hidden ffn"),), kind=DENSE),
)
EXPERT_MLP = (
    TensorRule(
        # The first key is that of local layers, the second that of Transformer Engine's.
        "mlp.linear_fc1.layer_norm_weight",
        (Part(_LAYER + "post_attention_layernorm.weight", "hidden"),),
        kind=EXPERTS,
        also=("pre_mlp_layernorm.weight",),
    ),
    TensorRule("mlp.router.weight", (Part(_LAYER + "mlp.gate.weight", "experts hidden"),), kind=EXPERTS),
    TensorRule(
        "mlp.experts.experts.linear_fc1.weight",
        (
            Part(_EXPERT + "gate_proj.weight", "expert_ffn hidden"),
            Part(_EXPERT + "up_proj.weight", "expert_ffn hidden"),
        ),
        STACKED,
        Scope.EXPERT,
        EXPERTS,
        in_transformers="mlp.experts.gate_up_proj",
    ),
    TensorRule(
        "mlp.experts.experts.linear_fc2.weight",
        (Part(_EXPERT + "down_proj.weight", "hidden expert_ffn"),),
        scope=Scope.EXPERT,
        kind=EXPERTS,
        in_transformers="mlp.experts.down_proj",
    ),
)

# What the layers of either spec ask for: local ones and Transformer Engine's.
STATES = (
    StateRule("decoder.final_layernorm", Scope.MODEL),
    StateRule("self_attention.linear_qkv", kind=FULL_ATTENTION),
    StateRule("self_attention.linear_proj", kind=FULL_ATTENTION),
    StateRule("mlp.linear_fc1", kind=DENSE),
    StateRule("mlp.linear_fc2", kind=DENSE),
)
QK_NORM_STATES = (
    StateRule("self_attention.q_layernorm", kind=FULL_ATTENTION),
    StateRule("self_attention.k_layernorm", kind=FULL_ATTENTION),
)
DELTA_NET_STATES = (
    StateRule("self_attention.in_proj", kind=DELTA_NET),
    StateRule("self_attention.out_norm", kind=DELTA_NET),
    StateRule("self_attention.out_proj", kind=DELTA_NET),
)
EXPERT_STATES = (
    StateRule("pre_mlp_layernorm", kind=EXPERTS),
    StateRule("mlp.experts.experts.linear_fc1", Scope.EXPERT, EXPERTS),
    StateRule("mlp.experts.experts.linear_fc2", Scope.EXPERT, EXPERTS),
)
