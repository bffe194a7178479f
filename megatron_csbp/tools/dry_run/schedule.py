# SPDX-License-Identifier: Apache-2.0
"""How long one attention layer takes when exchanges run beside tiles, in the order of `transformer.attention`. Pure.

Modelled: a collective and tiles beside it do not slow each other down. One collective is under way at a time.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionParts:
    """What one pass of an attention layer consists of, in seconds.

    Attributes:
        local: tiles with local keys; in a backward pass, those beside the first gather.
        beside_reduces: tiles with local keys that a backward pass keeps for the sums of gradients.
        gathered: tiles with gathered keys, of one head group.
        gather: the gather of one head group.
        reduce: the sum of the gradients of one head group.
        groups: head groups; 0 if nothing is exchanged.
    """

    local: float
    gathered: float
    gather: float = 0.0
    reduce: float = 0.0
    beside_reduces: float = 0.0
    groups: int = 0


@dataclass(frozen=True)
class Span:
    """A stretch of time.

    Attributes:
        seconds: of all.
        exposed: of it, seconds in which computation waits for an exchange.
    """

    seconds: float = 0.0
    exposed: float = 0.0


NO_TIME = Span()


def forward(parts: AttentionParts) -> Span:
    """Return a forward pass: local tiles beside the first gather, each group's tiles beside the next one's."""
    now, ready = parts.local, parts.gather
    waited = 0.0
    for group in range(parts.groups):
        waited += max(0.0, ready - now)
        now = max(now, ready)
        if group + 1 < parts.groups:
            ready = now + parts.gather  # it starts when the wait for the one before is queued
        now += parts.gathered
    return Span(now if parts.groups else parts.local + parts.gathered, waited)


def backward(parts: AttentionParts, *, keys_at_hand: bool) -> Span:
    """Return a backward pass: gathers beside tiles with gathered keys, sums of gradients beside local tiles.

    Args:
        parts: of the pass.
        keys_at_hand: whether the forward pass was just repeated and its gathered keys are still there.
    """
    if not parts.groups:
        return Span(parts.local + parts.gathered + parts.beside_reduces)
    now, waited = parts.local, 0.0
    ready = 0.0 if keys_at_hand else parts.gather
    share = parts.beside_reduces / parts.groups
    for group in range(parts.groups):
        waited += max(0.0, ready - now)
        now = max(now, ready)
        follows = group + 1 < parts.groups and not keys_at_hand
        # The next gather runs beside this group's tiles if none was under way; the sum comes behind it.
        ready = now + parts.gather if follows else 0.0
        now += parts.gathered
        if follows:
            waited += max(0.0, ready - now)
            now = max(now, ready)
        waited += max(0.0, parts.reduce - share)
        now += max(share, parts.reduce)
    return Span(now, waited)
