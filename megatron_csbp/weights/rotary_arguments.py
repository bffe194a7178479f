# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings: the entries of config.json and Megatron's arguments, in both directions.

`transformers` 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`. Both are read.
"""

from collections.abc import Mapping
from typing import Any

_YARN = (
    # config.json, Megatron's argument, value that config.json leaves out
    ("factor", "rotary_scaling_factor", None),
    ("original_max_position_embeddings", "yarn_original_max_position_embeddings", None),
    ("beta_fast", "yarn_beta_fast", 32.0),
    ("beta_slow", "yarn_beta_slow", 1.0),
)
_KNOWN = {"rope_type", "type", "rope_theta", "mscale", "mscale_all_dim", "truncate", "max_position_embeddings"}
OF_PICTURES = ("mrope_section", "mrope_interleaved")
"""How positions in pictures and films are told; those of text are plain ones whatever these say."""


def rope_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary entries of a config.json, old or new, as `rope_parameters` has them."""
    entries = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    entries.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    entries.setdefault("rope_type", entries.get("type", "default"))
    if "partial_rotary_factor" in config:
        entries.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return entries


def arguments_of_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments of the position embedding.

    Raises:
        ValueError: a kind of RoPE, or an entry of it, that Megatron does not have.
    """
    entries = rope_entries(config)
    kind, theta = entries["rope_type"], entries["rope_theta"]
    if int(theta) != theta:
        raise ValueError(f"rope_theta {theta} in config.json must be a whole number: --rotary-base takes no other.")
    arguments: dict[str, Any] = {
        "rotary_base": int(theta),
        "rotary_percent": float(entries.get("partial_rotary_factor", 1.0)),
        "add_position_embedding": True,
    }
    if kind == "default":
        return {"position_embedding_type": "rope"} | arguments
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} in config.json is not implemented; 'default' and 'yarn' are.")
    strange = (
        set(entries)
        - _KNOWN
        - {name for name, _, _ in _YARN}
        - {"partial_rotary_factor", "llama_4_scaling_beta", *OF_PICTURES}
    )
    if strange:
        raise ValueError(f"the YaRN entries {', '.join(sorted(strange))} in config.json are not implemented.")
    arguments["position_embedding_type"] = "yarn"
    for name, argument, default in _YARN:
        value = entries.get(name, default)
        if value is None and name == "original_max_position_embeddings":
            value = config["max_position_embeddings"]
        arguments[argument] = value
    # transformers scales by the ratio of both only if both are given and not 0; by the first alone is Megatron's 1
    # and 0.
    both = entries.get("mscale") and entries.get("mscale_all_dim")
    arguments["mscale"] = entries["mscale"] if both else 1.0
    arguments["mscale_all_dim"] = entries["mscale_all_dim"] if both else 0.0
    arguments["yarn_correction_range_round_to_int"] = entries.get("truncate", True)
    if entries.get("llama_4_scaling_beta"):
        arguments["query_scale_beta"] = entries["llama_4_scaling_beta"]
    return arguments


def rope_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json for Megatron's arguments: the inverse of `arguments_of_rope`."""
    entries: dict[str, Any] = {"rope_theta": float(arguments["rotary_base"]), "rope_type": "default"}
    if arguments.get("rotary_percent", 1.0) != 1.0:
        entries["partial_rotary_factor"] = arguments["rotary_percent"]
    if arguments["position_embedding_type"] == "yarn":
        entries["rope_type"] = "yarn"
        for name, argument, default in _YARN:
            value = arguments.get(argument)
            entries[name] = default if value is None else value
        if arguments.get("mscale_all_dim"):
            entries |= {"mscale": arguments["mscale"], "mscale_all_dim": arguments["mscale_all_dim"]}
        if arguments.get("yarn_correction_range_round_to_int") is False:
            entries["truncate"] = False
        if arguments.get("query_scale_beta"):
            entries["llama_4_scaling_beta"] = arguments["query_scale_beta"]
    return {"rope_parameters": entries}
