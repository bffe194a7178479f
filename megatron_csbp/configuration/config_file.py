# SPDX-License-Identifier: Apache-2.0
"""`--yaml-cfg`: flags from a YAML file. The command line wins over the file.

Keys are flag names, with or without dashes (`context-parallel-size` or `context_parallel_size`). Sections are allowed
and only group (`model_parallel:` and `language_model:` as in Megatron's own YAML files). An unknown key is an error:
nothing is dropped.
"""

import argparse
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

# Names of Megatron's own YAML files that differ from the name of the flag: key -> how to say it.
_MEGATRON_YAML_NAMES = {"num_moe_experts": "num_experts"}
_ACTIVATIONS: dict[str, dict[str, object]] = {
    "swiglu": {"swiglu": True},
    "squaredrelu": {"squared_relu": True},
    "gelu": {},
}


def take_yaml_flag(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the path after `--yaml-cfg` (None if absent) and the command line without it."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg", type=Path, default=None)
    helps = [arg for arg in argv if arg in ("-h", "--help")]
    known, rest = parser.parse_known_args([arg for arg in argv if arg not in helps])
    return known.yaml_cfg, rest + helps


def flags_given(argv: Sequence[str]) -> set[str]:
    """Return the long flags of a command line, without their values."""
    return {arg.split("=", 1)[0] for arg in argv if arg.startswith("--")}


def set_defaults_from_yaml(parser: ArgumentParser, path: Path) -> set[str]:
    """Make the values of a YAML file the parser's defaults.

    Args:
        parser: parser with every flag of Megatron and of this package.
        path: the file.

    Returns:
        The flags that the file gives, spelled as on a command line.

    Raises:
        SystemExit: from `parser.error`: no such file, not YAML, an unknown key, or a value that the flag does not
            take.
    """
    try:
        document = yaml.load(path.read_text(), Loader=_UniqueKeyLoader)
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--yaml-cfg {path}: {' '.join(str(error).split())}")
    if not isinstance(document, dict):
        parser.error(f"--yaml-cfg {path}: must hold `flag-name: value` lines, for example `context-parallel-size: 2`.")
    actions = {action.dest: action for action in parser._actions}
    by_flag = {
        flag.lstrip("-").replace("-", "_"): action for action in parser._actions for flag in action.option_strings
    }
    given: set[str] = set()
    key_of: dict[str, str] = {}
    for key, value in _flatten(document):
        for name, setting in translated(key, value).items():
            action = by_flag.get(name) or actions.get(name)
            if action is None:
                parser.error(f"--yaml-cfg {path}: {key!r} is not a flag; see --help for the names.")
            if action.dest in key_of:
                parser.error(
                    f"--yaml-cfg {path}: {key!r} and {key_of[action.dest]!r} set the same flag; keep one of them."
                )
            key_of[action.dest] = key
            parser.set_defaults(**{action.dest: _value(parser, action, path, key, setting, name)})
            action.required = False
            given.update(action.option_strings)
    return given


def switches_and_values(path: Path) -> dict[str, Any]:
    """Return what a YAML file says, by flag name with underscores; nothing if it cannot be read.

    For those who look at a few flags before the parser that knows all of them reads the file, and reports its faults.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    settings = _flatten(document) if isinstance(document, dict) else ()
    return {name: value for key, setting in settings for name, value in translated(key, setting).items()}


class _UniqueKeyLoader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that comes twice in one mapping, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} comes twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _flatten(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flatten(value)
        else:
            yield str(key), value


def translated(key: str, value: Any) -> dict[str, Any]:
    """Return a key and its value as flags have them: the names of Megatron's own YAML files differ in places."""
    name = key.lstrip("-").replace("-", "_")
    if name == "activation_func" and value in _ACTIVATIONS:
        return _ACTIVATIONS[value]
    return {_MEGATRON_YAML_NAMES.get(name, name): value}


def _value(parser: ArgumentParser, action: argparse.Action, path: Path, key: str, value: Any, name: str) -> Any:
    """Return a YAML value as the flag would have stored it."""
    if value is None:
        return None
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"--yaml-cfg {path}: {key}: {value!r} must be true or false.")
        return _switch(action, name, value)
    many = action.nargs in ("+", "*") or isinstance(action.nargs, int)
    items = value if isinstance(value, list) else str(value).split() if many and isinstance(value, str) else [value]
    wanted = action.nargs if isinstance(action.nargs, int) else len(items) if many else 1
    if len(items) != wanted or (not items and action.nargs == "+"):
        parser.error(f"--yaml-cfg {path}: {key}: {value!r} must be {_how_many(action.nargs)}.")
    try:
        converted = [parser._get_value(action, str(item)) for item in items]
        for item in converted:
            parser._check_value(action, item)
    except argparse.ArgumentError as error:
        parser.error(f"--yaml-cfg {path}: {key}: {error}")
    return converted if many else converted[0]


def _how_many(nargs: int | str | None) -> str:
    return f"a list of {nargs}" if isinstance(nargs, int) else "a list, not empty" if nargs == "+" else "one value"


def _switch(action: argparse.Action, name: str, value: bool) -> Any:
    """Return what a flag without a value stores.

    `no-persist-layer-norm: true` says what the flag says; `persist_layer_norm: false` says what it stores.
    """
    if f"--{name.replace('_', '-')}" not in action.option_strings:
        return value
    if isinstance(action, argparse.BooleanOptionalAction):
        return value != name.startswith("no_")
    return action.const if value else not action.const
