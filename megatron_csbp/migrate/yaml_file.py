# SPDX-License-Identifier: Apache-2.0
"""A YAML file of settings, Megatron's own or of another program, as one that `--yaml-cfg` here takes.

Keys that set nothing (null, or false for a switch that is off) and that no flag stands for are taken out; a key that
does set something and has no flag stands in the way.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from megatron_csbp.configuration.config_file import translated
from megatron_csbp.migrate.edits import Edit, Migration
from megatron_csbp.migrate.rules import FlagRules, Setting, Verdict, Wanted, length_problem, own_flags

_CONTEXT = "context_parallel_size"
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
_DERIVED = {
    "gated_linear_unit": "activation_func says it",
    "params_dtype": "bf16 and fp16 say it",
    "activation_func": "swiglu and squared-relu say it",
}


@dataclass(frozen=True)
class _Line:
    """A key of the file with its value and its place."""

    key: str
    value: Any
    start: int
    end: int
    line: int


def migrate_yaml(name: str, text: str, rules: FlagRules, wanted: Wanted) -> Migration:
    """Return what changes in a YAML file.

    Args:
        name: of the file.
        text: of the file.
        rules: of the flags.
        wanted: what the job shall have.

    Raises:
        ValueError: the file is no YAML mapping.
    """
    lines = _lines(name, text)
    edits: list[Edit] = []
    obstacles: list[str] = []
    seen: dict[str, tuple[str | None, ...]] = {}
    for line in lines:
        for key, value in translated(line.key, line.value).items():
            flag = rules.flag_of_key(key)
            if flag is None:
                _judge_unknown(text, line, edits, obstacles)
                continue
            if flag in seen:
                edits.append(_taken_out(text, line, f"{flag} comes twice, and this package reads one of each"))
                continue
            setting = Setting(flag, _values(value))
            seen[flag] = setting.values
            is_off = value is None or value is False
            for verdict in [] if is_off else rules.verdicts([setting]):
                _judge(text, line, verdict, edits, obstacles)
    context = _context(lines, wanted, edits)
    added = own_flags(wanted, context)
    if context is not None and not any(line.key == _CONTEXT for line in lines):
        added.insert(0, (f"--context-parallel-size {context}", "--context-size asks for it"))
    edits.append(_appended(text, added))
    size = int(context or 1)
    problem = length_problem(seen, size, wanted.block_size)
    obstacles += [problem] if problem is not None else []
    note = f"start it with: torchrun ... -m megatron_csbp.pretrain_gpt --yaml-cfg {name}"
    return Migration(name, text, edits, obstacles, [note], ["--yaml-cfg", name])


def _lines(name: str, text: str) -> list[_Line]:
    """Return the keys with plain values, those of sections too."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{name} must hold `flag-name: value` lines, for example `context-parallel-size: 2`.")
    return list(_keys(root))


def _keys(node: yaml.MappingNode) -> Iterator[_Line]:
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _keys(value)
        else:
            plain = yaml.SafeLoader("").construct_object(value, deep=True)
            start, end = key.start_mark, value.end_mark
            yield _Line(str(key.value).replace("-", "_"), plain, start.index, end.index, start.line + 1)


def _values(value: Any) -> tuple[str | None, ...]:
    if isinstance(value, list):
        return tuple(str(item) for item in value)
    return () if isinstance(value, bool) else (str(value),)


def _judge_unknown(text: str, line: _Line, edits: list[Edit], obstacles: list[str]) -> None:
    said = f"{line.key}: {line.value}"
    if line.key in _DERIVED:
        edits.append(_taken_out(text, line, f"{said} is left out: no flag; {_DERIVED[line.key]}"))
    elif line.value in _NOTHING:
        edits.append(_taken_out(text, line, f"{said} is left out: no flag of Megatron-Core 0.19, and it sets nothing"))
    else:
        obstacles.append(
            f"line {line.line}: {said}: no flag of Megatron-Core 0.19 stands for it; leave it out if it is a default "
            "or of another program, else find the flag in --help"
        )


def _judge(text: str, line: _Line, verdict: Verdict, edits: list[Edit], obstacles: list[str]) -> None:
    said = f"{line.key}: {line.value}"
    if verdict.replacement is None:
        obstacles.append(f"line {line.line}: {said}: {verdict.reason}")
    elif verdict.replacement:
        value = verdict.replacement.split(" ")[-1]
        edits.append(_replaced(line, value, f"{said} -> {value}: {verdict.reason}"))
    else:
        edits.append(_taken_out(text, line, f"{said} is left out: {verdict.reason}"))


def _taken_out(text: str, line: _Line, reason: str) -> Edit:
    first = text.rfind("\n", 0, line.start) + 1
    last = text.find("\n", line.end)
    return Edit(first, len(text) if last < 0 else last + 1, "", reason, line.line)


def _replaced(line: _Line, value: str, reason: str) -> Edit:
    return Edit(line.start, line.end, f"{line.key}: {value}", reason, line.line)


def _context(lines: list[_Line], wanted: Wanted, edits: list[Edit]) -> str | None:
    """Return the context size as it will be written; change the one that is there, if another is wanted."""
    given = [line for line in lines if line.key == _CONTEXT]
    if wanted.context is None:
        return str(given[0].value) if given and given[0].value not in (None, 1) else None
    if given and given[0].value != wanted.context:
        reason = f"{_CONTEXT}: {given[0].value} -> {wanted.context}: --context-size asks for it"
        edits.append(_replaced(given[0], str(wanted.context), reason))
    return str(wanted.context)


def _appended(text: str, added: list[tuple[str, str]]) -> Edit:
    pairs = [flag.removeprefix("--").split(" ") for flag, _ in added]
    lines = "".join(f"{key}: {value}\n" for key, value in pairs)
    reasons = "; ".join(f"{flag}: {reason}" for flag, reason in added)
    newline = "" if not text or text.endswith("\n") else "\n"
    return Edit(len(text), len(text), f"{newline}{lines}", f"added {reasons}", text.count("\n") + 1)


def looks_like_yaml(name: str, text: str) -> bool:
    """Return whether a file is YAML by its name or by its first line with a setting."""
    if re.search(r"\.ya?ml$", name):
        return True
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and re.match(r"[\w-]+:(\s|$)", lines[0]) is not None
