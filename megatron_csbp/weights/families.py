# SPDX-License-Identifier: Apache-2.0
"""The model families: for each, one table of tensors and one of settings, used in both directions.

To add a family, write its tables here and list it in `FAMILIES`; a layer of another kind (a linear attention, say) is
a `kind` of its own in `ModelShape.layer_kinds`, and another way to keep tensors a layout in `layouts`.
"""

from dataclasses import dataclass

from megatron_csbp.weights.layouts import GROUPED_QKV, STACKED, VOCABULARY
from megatron_csbp.weights.model_arguments import ConfigTable, Setting
from megatron_csbp.weights.model_shape import DENSE, EXPERTS
from megatron_csbp.weights.rules import Part, Scope, StateRule, TensorRule

_LAYER = "{body}layers.{layer}."
_EXPERT = "{body}layers.{layer}.mlp.experts.{expert}."


def _ends(head: str) -> tuple[TensorRule, ...]:
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


_ATTENTION = (
    TensorRule("self_attention.linear_qkv.layer_norm_weight", (Part(_LAYER + "input_layernorm.weight", "hidden"),)),
    TensorRule(
        "self_attention.linear_qkv.weight",
        (
            Part(_LAYER + "self_attn.q_proj.weight", "queries hidden"),
            Part(_LAYER + "self_attn.k_proj.weight", "keys hidden"),
            Part(_LAYER + "self_attn.v_proj.weight", "keys hidden"),
        ),
        GROUPED_QKV,
    ),
    TensorRule("self_attention.linear_proj.weight", (Part(_LAYER + "self_attn.o_proj.weight", "hidden queries"),)),
)
_QK_NORMS = (
    TensorRule("self_attention.q_layernorm.weight", (Part(_LAYER + "self_attn.q_norm.weight", "head"),)),
    TensorRule("self_attention.k_layernorm.weight", (Part(_LAYER + "self_attn.k_norm.weight", "head"),)),
)
_DENSE_MLP = (
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
_EXPERT_MLP = (
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
_STATES = (
    StateRule("decoder.final_layernorm", Scope.MODEL),
    StateRule("self_attention.linear_qkv"),
    StateRule("self_attention.linear_proj"),
    StateRule("mlp.linear_fc1", kind=DENSE),
    StateRule("mlp.linear_fc2", kind=DENSE),
)
_QK_NORM_STATES = (StateRule("self_attention.q_layernorm"), StateRule("self_attention.k_layernorm"))
_EXPERT_STATES = (
    StateRule("pre_mlp_layernorm", kind=EXPERTS),
    StateRule("mlp.experts.experts.linear_fc1", Scope.EXPERT, EXPERTS),
    StateRule("mlp.experts.experts.linear_fc2", Scope.EXPERT, EXPERTS),
)

_DECODER = (
    Setting("num_hidden_layers", "num_layers"),
    Setting("hidden_size", "hidden_size"),
    Setting("intermediate_size", "ffn_hidden_size"),
    Setting("num_attention_heads", "num_attention_heads"),
    Setting("num_key_value_heads", "num_query_groups"),
    Setting("head_dim", "kv_channels"),
    Setting("rms_norm_eps", "layernorm_epsilon", default=1e-6),
    Setting("max_position_embeddings", "max_position_embeddings", may_change=True),
)
_FIXED = {
    "group_query_attention": True,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_QWEN3_FIXED = _FIXED | {"qk_layernorm": True}
_QWEN3_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        model_type: as in config.json.
        models: names of published models, for messages.
        architecture: class that its config.json names.
        body: prefix of the decoder's tensors.
        rules: the tensors.
        states: modules with an extra state.
        config: the settings.
        transformers_type: model type under which `transformers` computes it, where its own code is not in there.
        transformers_body: prefix of the decoder's tensors there.
        transformers_head: name of the output layer's tensor there.
        head: name of the output layer's tensor.
        head_is_its_own: a model that has an output layer uses it, whatever config.json says of tying.
        objective: that of a model which was trained as a diffusion model, with the block size of its config.json.
    """

    model_type: str
    models: str
    architecture: str
    body: str
    rules: tuple[TensorRule, ...]
    states: tuple[StateRule, ...]
    config: ConfigTable
    transformers_type: str
    head: str = "lm_head.weight"
    transformers_body: str = "model."
    transformers_head: str = "lm_head.weight"
    head_is_its_own: bool = False
    objective: str | None = None


QWEN3 = Family(
    model_type="qwen3",
    models="Qwen3 0.6B to 32B",
    architecture="Qwen3ForCausalLM",
    body="model.",
    rules=(*_ends("lm_head.weight"), *_ATTENTION, *_QK_NORMS, *_DENSE_MLP),
    states=(*_STATES, *_QK_NORM_STATES),
    config=ConfigTable(_DECODER, _QWEN3_FIXED, _QWEN3_REQUIRED),
    transformers_type="qwen3",
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    models="Qwen3 with experts",
    architecture="Qwen3MoeForCausalLM",
    body="model.",
    rules=(*_ends("lm_head.weight"), *_ATTENTION, *_QK_NORMS, *_DENSE_MLP, *_EXPERT_MLP),
    states=(*_STATES, *_QK_NORM_STATES, *_EXPERT_STATES),
    config=ConfigTable(
        (
            *_DECODER,
            Setting("num_experts", "num_experts", other_names=("num_local_experts",)),
            Setting("num_experts_per_tok", "moe_router_topk"),
            Setting("moe_intermediate_size", "moe_ffn_hidden_size"),
        ),
        _QWEN3_FIXED | {"moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall"},
        _QWEN3_REQUIRED,
        has_experts=True,
    ),
    transformers_type="qwen3_moe",
)

MINISTRAL3 = Family(
    model_type="ministral3",
    models="Ministral 3 (text)",
    architecture="Ministral3ForCausalLM",
    body="model.",
    rules=(*_ends("lm_head.weight"), *_ATTENTION, *_DENSE_MLP),
    states=_STATES,
    config=ConfigTable(_DECODER, _FIXED, {"hidden_act": "silu", "sliding_window": None, "attention_dropout": 0.0}),
    transformers_type="ministral3",
)

NEMOTRON_LABS_DIFFUSION = Family(
    model_type="nemotron_labs_diffusion",
    models="Nemotron-Labs-Diffusion 3B, 8B, 14B",
    architecture="NemotronLabsDiffusionModel",
    body="encoder.",
    rules=(*_ends("diffusion_head.weight"), *_ATTENTION, *_DENSE_MLP),
    states=_STATES,
    config=MINISTRAL3.config,
    transformers_type="ministral3",
    head="diffusion_head.weight",
    head_is_its_own=True,
    objective="nemotron",
)

FAMILIES = {family.model_type: family for family in (QWEN3, QWEN3_MOE, MINISTRAL3, NEMOTRON_LABS_DIFFUSION)}


def family_of(config: dict[str, object], where: str) -> Family:
    """Return the family that a config.json names.

    Args:
        config: the file's contents.
        where: the folder, for the message.

    Raises:
        ValueError: there is no such family here.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        known = "; ".join(f"{family.model_type} ({family.models})" for family in FAMILIES.values())
        raise ValueError(f"{where} holds a model of type {name!r}, which has no table here. Known are {known}.")
    return FAMILIES[str(name)]
