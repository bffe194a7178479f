# SPDX-License-Identifier: Apache-2.0
"""config.json and Megatron's arguments, in both directions from one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_csbp.weights.model_shape import linear_layers
from megatron_csbp.weights.rotary_arguments import arguments_of_rope, rope_of_arguments

_LINEAR, _FULL = "linear_attention", "full_attention"

type Arguments = dict[str, Any]
type Config = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A value that has one name in config.json and another among Megatron's arguments.

    Attributes:
        config: the key in config.json.
        argument: Megatron's argument, as in its namespace.
        other_names: further keys under which config.json may have it.
        default: the value where config.json leaves it out; None if it must not.
        may_change: training may have used another value than the weights came with.
    """

    config: str
    argument: str
    other_names: tuple[str, ...] = ()
    default: Any = None
    may_change: bool = False


@dataclass(frozen=True)
class ConfigTable:
    """The settings of a family.

    Attributes:
        settings: values with two names.
        fixed: arguments that every model of the family has.
        required: keys of config.json that must have this value, or one of a tuple, where they are given: nothing else
            is implemented.
        has_experts: its MLPs are mixtures of experts.
        has_delta_nets: some of its layers are gated delta nets.
        defaults: what a config.json that leaves a key out means.
    """

    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any]
    has_experts: bool = False
    has_delta_nets: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def completed(self, config: Config) -> Config:
        """Return a config.json with what it leaves out."""
        return dict(self.defaults) | config


def arguments_from_config(table: ConfigTable, config: Config, vocab_divisible_by: int) -> Arguments:
    """Return the arguments that describe the model of a config.json.

    Args:
        table: the family's settings.
        config: the contents of config.json.
        vocab_divisible_by: the padded vocabulary is a multiple of it.

    Raises:
        ValueError: a setting is missing, or has a value that is not implemented.
    """
    config = table.completed(config)
    wrong = [
        f"{key} is {config[key]!r} and must be {' or '.join(map(repr, _allowed(value)))}"
        for key, value in table.required.items()
        if key in config and config[key] not in _allowed(value)
    ]
    if wrong:
        raise ValueError(f"config.json describes a model that is not implemented: {'; '.join(wrong)}.")
    arguments: Arguments = {}
    for setting in table.settings:
        arguments[setting.argument] = _configured(setting, config)
    arguments |= table.fixed
    arguments |= arguments_of_rope(config)
    if table.has_experts:
        arguments |= _arguments_of_experts(config, arguments["num_layers"])
    if table.has_delta_nets:
        arguments["linear_attention_freq"] = _linear_attention_frequency(config, arguments["num_layers"])
    arguments["untie_embeddings_and_output_weights"] = not config.get("tie_word_embeddings", False)
    rows = config["vocab_size"]
    arguments["padded_vocab_size"] = -(-rows // vocab_divisible_by) * vocab_divisible_by
    return arguments


def config_from_arguments(table: ConfigTable, arguments: Mapping[str, Any], vocab: int) -> Config:
    """Return the keys of config.json that Megatron's arguments decide: the inverse of `arguments_from_config`.

    Args:
        table: the family's settings.
        arguments: Megatron's.
        vocab: rows of the embedding.
    """
    config: Config = {setting.config: arguments.get(setting.argument) for setting in table.settings}
    if not arguments.get("group_query_attention"):
        config["num_key_value_heads"] = config["num_attention_heads"]
    config |= rope_of_arguments(arguments)
    if table.has_experts:
        config |= _config_of_experts(arguments)
    if table.has_delta_nets:
        config["layer_types"] = [_LINEAR if linear else _FULL for linear in linear_layers(arguments)]
    config["tie_word_embeddings"] = not arguments["untie_embeddings_and_output_weights"]
    config["vocab_size"] = vocab
    return config | {key: _allowed(value)[0] for key, value in table.required.items()}


def _allowed(required: Any) -> tuple[Any, ...]:
    return required if isinstance(required, tuple) else (required,)


def _configured(setting: Setting, config: Config) -> Any:
    for key in (setting.config, *setting.other_names):
        if config.get(key) is not None:
            return config[key]
    if setting.config == "head_dim":
        return config["hidden_size"] // config["num_attention_heads"]
    if setting.default is None:
        raise ValueError(f"config.json has no {setting.config}, which this family needs.")
    return setting.default


def _linear_attention_frequency(config: Config, num_layers: int) -> int | list[int]:
    """Return Megatron's `--linear-attention-freq`: N if every Nth layer alone is full attention, else a list.

    Raises:
        ValueError: a layer is of a kind that is not implemented, or there are not as many kinds as layers.
    """
    interval = config.get("full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        return int(interval)
    unknown = sorted(set(kinds) - {_LINEAR, _FULL})
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"layer_types of config.json has {len(kinds)} entries for {num_layers} layers, with {unknown or 'none'} "
            f"that are not implemented; {_LINEAR} and {_FULL} are."
        )
    pattern = [int(kind == _LINEAR) for kind in kinds]
    first_full = pattern.index(0) + 1 if 0 in pattern else 0
    regular = first_full and pattern == [int((layer + 1) % first_full != 0) for layer in range(num_layers)]
    return first_full if regular else pattern


def _arguments_of_experts(config: Config, num_layers: int) -> Arguments:
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    layers = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)]
    return {
        # Megatron's softmax goes over the chosen experts, unless it is taken before the choice.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        "moe_layer_freq": 1 if all(layers) else layers,
    }


def _config_of_experts(arguments: Mapping[str, Any]) -> Config:
    frequency = arguments.get("moe_layer_freq", 1)
    layers = range(arguments["num_layers"])
    sparse = [layer % frequency == 0 for layer in layers] if isinstance(frequency, int) else [*map(bool, frequency)]
    coefficient = arguments.get("moe_aux_loss_coeff") or 0.0
    return {
        "norm_topk_prob": not arguments.get("moe_router_pre_softmax"),
        "router_aux_loss_coef": coefficient[0] if isinstance(coefficient, list) else coefficient,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in layers if not sparse[layer]],
    }
