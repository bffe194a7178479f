# SPDX-License-Identifier: Apache-2.0
"""Weights go into the network that they were trained in.

What belongs to the network is not listed: it is every field of Megatron's model configuration but those below, which
say how it is computed, divided or regularised. So a flag that a later Megatron adds is compared until somebody puts it
there.
"""

import copy
import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_csbp import megatron_checkpoints
from megatron_csbp.configuration.flag_names import FlagNames

_HOW_IT_IS_COMPUTED = re.compile(
    # Precision, kernels, fusion, graphs, memory.
    r"fp8|fp4|fp16|bf16|_in_fp32|_dtype|kitchen|precision_config|backend|flash_|fusion|fused|fuser|persist_|memory_"
    r"|cuda_graph|recompute|saved_activations|offload|paged_stash|clone_scatter|grouped_gemm|transformer_impl"
    r"|batch_invariant|symmetric_ar|use_te_|num_sms|num_blocks_permute|num_blocks_unpermute|mem_eff_path|mlp_chunks"
    # Division over ranks and transport of tokens to experts.
    r"|pipeline|cp_comm|dispatcher|deepep|hybridep|ncclep|_overlap$|a2a_comm|nccl_"
    # Start values, regularisation, and losses beside the main one.
    r"|init_|dropout|jitter|loss|load_balancing|bias_update_rate|quantile_balancing|router_force|routing_replay"
    r"|capacity|token_drop|padding_for|qk_clip|max_attention_logit"
    # Logging and inference.
    r"|logging|logger|inference|test_mode"
)
# Rotary positions have no weights and are changed on purpose, for longer contexts.
_POSITIONS = re.compile(r"^(rotary_|rope_|yarn_|seq_len_interpolation|position_embedding_type)")
# The vocabulary may grow, as it may in Megatron; `vocabulary_rules` of the checkpoint look at it.
_VOCABULARY = {"vocab_size", "should_pad_vocab", "make_vocab_size_divisible_by"}


def settings_of_network(args: Namespace) -> dict[str, Any]:
    """Return what the arguments say of the network, by field of Megatron's configuration."""
    settings = megatron_checkpoints.network_settings(args)
    if settings.get("position_embedding_type") != "learned_absolute":
        settings.pop("seq_length", None)  # the number of learned positions
    return {
        name: value
        for name, value in settings.items()
        if name not in _VOCABULARY and not _HOW_IT_IS_COMPUTED.search(name)
    }


def check_network(args: Namespace, saved: Namespace, source: str, is_resumed: bool, flags: FlagNames) -> list[str]:
    """Compare the network of this run with the one that a checkpoint's weights were trained in.

    Args:
        args: validated arguments.
        saved: the checkpoint's arguments. What they do not have, an older Megatron did not know: not compared.
        source: how the run came to the checkpoint, for messages.
        is_resumed: whether the same run goes on; else a new run starts from the weights.
        flags: how arguments are spelled.

    Returns:
        What differs in a new run and may: rotary positions and numbers such as the epsilon of a norm.

    Raises:
        ValueError: another difference; every one in a resumed run.
    """
    completed = Namespace(**vars(args) | vars(saved))
    now, before = settings_of_network(args), settings_of_network(completed)
    differing = [name for name in sorted(now.keys() | before.keys()) if now.get(name) != before.get(name)]
    adjusted = [] if is_resumed else [name for name in differing if _may_be_adjusted(name, before, now)]
    refused = [name for name in differing if name not in adjusted]
    if refused:
        differs, remedies = _in_words(refused, args, saved, now, before, flags)
        only_numbers = is_resumed and all(_may_be_adjusted(name, before, now) for name in refused)
        instead = ", or --finetune to start a new run from these weights" if only_numbers else ""
        raise ValueError(
            f"{' and '.join(differs)} in the checkpoint that {source} names: its weights do not fit this network. "
            f"{'. '.join(remedies)}{instead}."
        )
    return _in_words(adjusted, args, saved, now, before, flags)[0] if adjusted else []


def _may_be_adjusted(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    values = before.get(name), now.get(name)
    if _POSITIONS.match(name):
        return "learned_absolute" not in values
    return any(isinstance(value, float) for value in values)


def _in_words(
    fields: list[str],
    args: Namespace,
    saved: Namespace,
    now: Mapping[str, Any],
    before: Mapping[str, Any],
    flags: FlagNames,
) -> tuple[list[str], list[str]]:
    """Say which flags make fields differ, and what to use: those whose old value changes one of the fields."""
    differs, remedies = [], []
    for name, value in sorted(vars(saved).items()):
        if name not in vars(args) or getattr(args, name) == value:
            continue
        if _changes(fields, args, name, value, now):
            difference, remedy = flags.difference(name, value, getattr(args, name))
            differs.append(difference)
            remedies.append(remedy)
    if not differs:  # only several together
        differs = [f"{field} {now.get(field)} differs from {before.get(field)}" for field in fields]
        remedies = ["Use the flags of the run that wrote it"]
    return differs, remedies


def _changes(fields: list[str], args: Namespace, name: str, value: object, now: Mapping[str, Any]) -> bool:
    """Return whether one argument, set to a value, changes one of the fields."""
    changed = copy.copy(args)
    setattr(changed, name, value)
    try:
        alone = settings_of_network(changed)
    except AssertionError:  # it excludes another flag that is given
        return True
    return any(alone.get(field) != now.get(field) for field in fields)
