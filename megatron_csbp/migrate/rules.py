# SPDX-License-Identifier: Apache-2.0
"""What changes among the flags of a Megatron job that becomes a block-diffusion job, and what stands in the way."""

from argparse import Action, ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_csbp.configuration.unsupported_features import UNSUPPORTED, Unsupported

MASK_TOKEN_PLACEHOLDER = "MASK_TOKEN_ID"
_OF_THE_MODEL = (
    "mtp_num_layers",
    "multi_latent_attention",
    "softmax_type",
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "apply_query_key_layer_scaling",
    "sft",
    "fim_data",
    "perform_rl_step",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
)
"""Leaving these out makes another model, or another run: a person has to decide."""
_GONE = {
    "--no-async-tensor-model-parallel-allreduce": "Megatron decides by itself",
    "--overlap-p2p-communication": "it is on by default with the interleaved schedule",
    "--no-query-key-layer-scaling": "that scaling is off by default",
    "--enable-one-logger": "it had no effect on training",
    "--clone-scatter-output-in-embedding": "it is on by default",
    "--delay-grad-reduce": "--align-grad-reduce, which is on by default, has taken its place",
}
"""Flags that older scripts have, and why they can be left out."""


@dataclass(frozen=True)
class Setting:
    """A flag, or a key of a file, with its values.

    Attributes:
        name: as it is spelled.
        values: as the job has them; None for one that only the job itself knows.
    """

    name: str
    values: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What becomes of a setting that cannot stay as it is.

    Attributes:
        setting: the setting.
        reason: why.
        replacement: what stands there instead; None if it stays, and stands in the way.
    """

    setting: Setting
    reason: str
    replacement: str | None


class FlagRules:
    """Judges the flags of a job by this Megatron's parser and by what block diffusion cannot do."""

    def __init__(self, parser: ArgumentParser) -> None:
        """Take the parser of Megatron's and this package's flags."""
        self._actions: dict[str, Action] = {
            option: action for action in parser._actions for option in action.option_strings
        }
        self._refused = {feature.name: feature for feature in UNSUPPORTED}

    def flag_of_key(self, key: str) -> str | None:
        """Return the flag that a key of a YAML file stands for, by name or by what it stores."""
        name = key.lstrip("-").replace("_", "-")
        if f"--{name}" in self._actions:
            return f"--{name}"
        stored = key.lstrip("-").replace("-", "_")
        return next((flag for flag, action in self._actions.items() if action.dest == stored), None)

    def verdicts(self, settings: Iterable[Setting]) -> list[Verdict]:
        """Return what cannot stay, in the order of the settings."""
        return [verdict for setting in settings if (verdict := self._verdict(setting)) is not None]

    def _verdict(self, setting: Setting) -> Verdict | None:
        action = self._actions.get(setting.name)
        if action is None:
            if setting.name in _GONE:
                return Verdict(setting, f"not a flag of Megatron-Core 0.19: {_GONE[setting.name]}", "")
            return Verdict(setting, "not a flag of Megatron-Core 0.19; --help lists those that are", None)
        if action.dest == "attention_dropout" and _number(setting) != 0.0:
            return Verdict(setting, "the tiles of a row cannot share a dropout mask; it is turned off", "")
        feature = self._refused.get(action.dest)
        if feature is None or feature.is_off(_stored(action, setting)):
            return None
        return _of_feature(setting, feature)


def _of_feature(setting: Setting, feature: Unsupported) -> Verdict:
    reason = f"not supported with block diffusion: {feature.reason}; {feature.instead}"
    if feature.name in _OF_THE_MODEL:
        return Verdict(setting, reason, None)
    if feature.name in ("ckpt_format", "cuda_graph_impl", "dataloader_type", "attention_backend"):
        return Verdict(setting, reason, feature.instead.removeprefix("use ").split(" or ")[0])
    return Verdict(setting, reason, "")


def _stored(action: Action, setting: Setting) -> object:
    """Return what the parser would store, near enough to see whether a feature is on."""
    if action.nargs == 0:
        return action.const if action.const is not None else not setting.name.startswith("--no-")
    if len(setting.values) == 1 and action.nargs is None:
        value = setting.values[0]
        return int(value) if value is not None and value.isdigit() else value
    return list(setting.values)


def _number(setting: Setting) -> float | None:
    try:
        return float(setting.values[0] or "")
    except (ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Wanted:
    """What the block-diffusion job shall have.

    Attributes:
        context: ranks that share a sequence; None to keep what the job has.
        block_size: tokens of a diffusion block.
        mask_token: id of the mask token; None for one to be chosen.
    """

    context: int | None = None
    block_size: int = 32
    mask_token: int | None = None

    @property
    def mask_word(self) -> str:
        """The mask token as it is written into the command."""
        return MASK_TOKEN_PLACEHOLDER if self.mask_token is None else str(self.mask_token)


def own_flags(wanted: Wanted, context: str | None) -> list[tuple[str, str]]:
    """Return the flags to add, each with its reason.

    Args:
        wanted: what the job shall have.
        context: the value of `--context-parallel-size` as it will stand; None without the flag.
    """
    added = []
    if context is not None and context != "1":
        reason = "the ranks of the context group share the blocks too: CSBP, half the traffic of context parallelism"
        added.append((f"--bp-size {context}", reason))
    added.append(
        (f"--diffusion-block-size {wanted.block_size}", "turns block diffusion on; without it this is plain Megatron")
    )
    reason = "stands for a corrupted token: an id that no text yields (docs/objectives.md#the-mask-token)"
    added.append((f"--mask-token-id {wanted.mask_word}", reason))
    return added


def length_problem(settings: Mapping[str, Sequence[str | None]], context: int, block_size: int) -> str | None:
    """Return why the sequence length does not fit, if it is known and does not."""
    values = settings.get("--seq-length") or [None]
    if values[0] is None or not values[0].isdigit():
        return None
    length = int(values[0])
    unit = 2 * context * block_size if context > 1 else block_size
    if length % unit == 0:
        return None
    below, above = length // unit * unit, -(-length // unit) * unit
    works = f"{below} or {above}" if below else str(above)
    what = f"2 x {context} ranks x block size {block_size}" if context > 1 else f"block size {block_size}"
    return f"--seq-length {length} must be a multiple of {what} = {unit}: use {works}"
