# SPDX-License-Identifier: Apache-2.0
"""The model families: for each, one table of tensors and one of settings, used in both directions.

To add a family, put it together here and list it in `FAMILIES`; tensors that no other family has go into
`tensor_tables`. A layer of another kind is a `kind` of its own in `ModelShape.layer_kinds`, and another way to
keep tensors a layout in `layouts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_csbp.weights.model_arguments import Config, ConfigTable, Setting
from megatron_csbp.weights.rules import StateRule, TensorRule
from megatron_csbp.weights.tensor_tables import (
    ATTENTION,
    DELTA_NET_STATES,
    DELTA_NETS,
    DENSE_MLP,
    EXPERT_MLP,
    EXPERT_STATES,
    GATED_ATTENTION,
    QK_NORM_STATES,
    QK_NORMS,
    STATES,
    ends,
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
        text_config: key of config.json that holds the settings of the text model, where it is part of a larger one.
        left_out: beginnings of the names of tensors that are not imported, and what they are.
        text_type: model type of the text model by itself, which is what an export of a part of a larger one is.
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
    text_config: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    text_type: str | None = None

    def of_text_alone(self, config: Config) -> Config:
        """Return the config.json of the text model, which may be part of a larger one.

        Args:
            config: contents of config.json.

        Raises:
            ValueError: it has no settings of the text model.
        """
        if self.text_config is None:
            return config
        text = config.get(self.text_config)
        if not isinstance(text, dict):
            raise ValueError(
                f"config.json of a {self.model_type} has no {self.text_config}, the text model's settings."
            )
        return {"tie_word_embeddings": config.get("tie_word_embeddings", False)} | text | self._named()

    def _named(self) -> Config:
        assert self.text_type is not None
        return {"model_type": self.text_type, "architectures": [FAMILIES[self.text_type].architecture]}


QWEN3 = Family(
    model_type="qwen3",
    models="Qwen3 0.6B to 32B",
    architecture="Qwen3ForCausalLM",
    body="model.",
    rules=(*ends("lm_head.weight"), *ATTENTION, *QK_NORMS, *DENSE_MLP),
    states=(*STATES, *QK_NORM_STATES),
    config=ConfigTable(_DECODER, _QWEN3_FIXED, _QWEN3_REQUIRED),
    transformers_type="qwen3",
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    models="Qwen3 with experts",
    architecture="Qwen3MoeForCausalLM",
    body="model.",
    rules=(*ends("lm_head.weight"), *ATTENTION, *QK_NORMS, *DENSE_MLP, *EXPERT_MLP),
    states=(*STATES, *QK_NORM_STATES, *EXPERT_STATES),
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
    rules=(*ends("lm_head.weight"), *ATTENTION, *DENSE_MLP),
    states=STATES,
    config=ConfigTable(_DECODER, _FIXED, {"hidden_act": "silu", "sliding_window": None, "attention_dropout": 0.0}),
    transformers_type="ministral3",
)

NEMOTRON_LABS_DIFFUSION = Family(
    model_type="nemotron_labs_diffusion",
    models="Nemotron-Labs-Diffusion 3B, 8B, 14B",
    architecture="NemotronLabsDiffusionModel",
    body="encoder.",
    rules=(*ends("diffusion_head.weight"), *ATTENTION, *DENSE_MLP),
    states=STATES,
    config=MINISTRAL3.config,
    transformers_type="ministral3",
    head="diffusion_head.weight",
    head_is_its_own=True,
    objective="nemotron",
)

_MULTI_TOKEN = {"mtp.": "multi-token prediction"}

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    models="the text part of Qwen3.5 and Qwen3.8 27B",
    architecture="Qwen3_5ForCausalLM",
    body="model.",
    rules=(*ends("lm_head.weight"), *GATED_ATTENTION, *QK_NORMS, *DELTA_NETS, *DENSE_MLP),
    states=(*STATES, *QK_NORM_STATES, *DELTA_NET_STATES),
    config=ConfigTable(
        (
            *_DECODER,
            Setting("linear_num_key_heads", "linear_num_key_heads"),
            Setting("linear_num_value_heads", "linear_num_value_heads"),
            Setting("linear_key_head_dim", "linear_key_head_dim"),
            Setting("linear_value_head_dim", "linear_value_head_dim"),
            Setting("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
        ),
        _QWEN3_FIXED
        | {
            "attention_output_gate": True,
            "apply_layernorm_1p": True,
            "experimental_attention_variant": "gated_delta_net",
        },
        # Swish is another name of SiLU; the models that gate by a sigmoid are of another type.
        {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True}
        | {"output_gate_type": ("swish", "silu")},
        has_delta_nets=True,
        defaults={"partial_rotary_factor": 0.25},
    ),
    transformers_type="qwen3_5_text",
    left_out=_MULTI_TOKEN,
)

QWEN3_5 = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    models="Qwen3.5 and Qwen3.8 27B",
    architecture="Qwen3_5ForConditionalGeneration",
    body="model.language_model.",
    text_config="text_config",
    left_out=_MULTI_TOKEN | {"model.visual.": "the vision encoder"},
    text_type="qwen3_5_text",
)

FAMILIES = {
    family.model_type: family
    for family in (QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_TEXT, MINISTRAL3, NEMOTRON_LABS_DIFFUSION)
}


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
