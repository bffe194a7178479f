# SPDX-License-Identifier: Apache-2.0
"""The model's arguments as flags, for a YAML file that `--yaml-cfg` reads."""

from collections.abc import Mapping
from typing import Any

import yaml

# Arguments whose flag has another name.
_FLAGS = {"layernorm_epsilon": "norm-epsilon"}
# Arguments that only say the opposite of a flag.
_OPPOSITES = {"add_bias_linear": "disable-bias-linear"}
# Arguments whose flag takes a list in the words of Python.
_PATTERNS = {"moe_layer_freq", "linear_attention_freq"}
# Arguments without a flag, or whose default is right.
_SILENT = {"add_position_embedding"}


def flags_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags, without dashes in front, and their values; a flag that is not given is left out.

    Args:
        arguments: by name, as in Megatron's namespace.
    """
    flags: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _SILENT or value is None:
            continue
        if name in _OPPOSITES:
            if not value:
                flags[_OPPOSITES[name]] = True
        elif value is False:
            if name == "yarn_correction_range_round_to_int":
                flags["no-yarn-correction-range-round-to-int"] = True
        elif name in _PATTERNS:
            flags[name.replace("_", "-")] = str(value).replace(" ", "")
        else:
            flags[_FLAGS.get(name, name.replace("_", "-"))] = value
    return flags


def yaml_text(header: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a file for `--yaml-cfg`.

    Args:
        header: lines of comment.
        sections: flags by section; empty ones are left out.
    """
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    filled = {name: dict(flags) for name, flags in sections.items() if flags}
    return comment + yaml.safe_dump(filled, sort_keys=False)
