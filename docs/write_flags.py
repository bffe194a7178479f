# SPDX-License-Identifier: Apache-2.0
"""Prints docs/flags.md from the parser.

.venv/bin/python docs/write_flags.py > docs/flags.md
"""

from argparse import Action, ArgumentParser

from megatron_csbp.arguments import add_arguments
from megatron_csbp.configuration.unsupported_features import UNSUPPORTED

HEAD = """# Flags

The flags that this package adds to Megatron's own, as `--help` has them, and those of Megatron's that it
[refuses](#refused). They work on the command line and, but for `--device`, in a `--yaml-cfg` file. This page is
written by `docs/write_flags.py`; a test compares it with the parser.

## In short

| flag | default | |
|---|---|---|
| `--diffusion-block-size M` | | turns block diffusion on |
| `--mask-token-id ID` | the tokenizer's own | the token that stands for a corrupted one: no text may yield it |
| `--bp-size P` (`--block-parallel-size`) | 1 | ranks that share a sequence ([which](parallelism.md#four-schemes)) |
| `--diffusion-objective` | `block-diffusion` | or `nemotron`, `fast-dllm-v2` ([objectives](objectives.md)) |
| `--corrupted-views V` | 1 | corrupted copies that share one clean copy |
| `--window-anchor` | `position` | for Megatron's `--window-size W-1,0`: layers with a window exchange its halo only |
| `--pack-documents` | off | samples of whole documents, for [fine-tuning](fine_tuning.md) |
| `--clean-attention` | by objective | `block-causal` or `token-causal` |
| `--noise-schedule`, `--noise-eps` | `log-linear`, 0.001 | also `square`, `sqrt`, `log`, `cosine` |
| `--device` | `auto` | `cpu` for debugging anywhere |

## All

| flag | default | meaning |
|---|---|---|"""

FOOT = """
`--context-parallel-size` is Megatron's own. Together with `--bp-size` it chooses the scheme:
[parallelism](parallelism.md#four-schemes). `--yaml-cfg FILE` reads flags from a YAML file; the command line wins
over it ([why](adr/0008-yaml-files-give-flags.md)).

## Refused

Flags of Megatron that a block-diffusion run does not take, with the reason as the message has it. Some are of other
Megatron versions than 0.19.

| flag | reason | instead |
|---|---|---|"""


def row(action: Action) -> str:
    """Return the table row of a flag."""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    values = " {" + ", ".join(action.choices) + "}" if action.choices else ""
    text = (action.help or "").replace("|", "\\|")
    default = "off" if action.default is False else "" if action.default is None else f"`{action.default}`"
    return f"| {names}{values} | {default} | {text} |"


def page() -> str:
    """Return the whole page."""
    parser = ArgumentParser(add_help=False)
    add_arguments(parser)
    refused = [f"| `{feature.flag}` | {feature.reason} | {feature.instead} |" for feature in UNSUPPORTED]
    return "\n".join([HEAD, *(row(action) for action in parser._actions), FOOT, *refused, ""])


if __name__ == "__main__":
    print(page(), end="")
