# SPDX-License-Identifier: Apache-2.0
"""The order in which a rank starts exchanges, waits for them and computes tiles, as profilers see it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_csbp.transformer import annotations
from megatron_csbp.transformer.attention import AttentionContext
from megatron_csbp.transformer.communication import runs_in_backward
from tests.support.attention_cases import Case, gradients_on_group, plain
from tests.support.fake_cuda import StreamedCollectives, TickingKernel, use_fake_cuda

# So many blocks that each head group has a local tile to hide its gradients behind.
CASE = Case(num_query_heads=4, num_key_value_heads=2, blocks_per_chunk=8)


def recorded_schedule(num_head_groups: int) -> dict[str, list[str]]:
    """Run one attention layer forward and backward on two ranks, and return what rank 1 did in each pass.

    Args:
        num_head_groups: groups of heads that are exchanged one after the other.

    Returns:
        By pass: `start gather`, `wait gather`, `start reduce`, `wait reduce`, and a tile as `tile KIND`.
    """
    records: dict[int, list[tuple[bool, str]]] = {}
    ranks: dict[int, int] = {}

    @contextmanager
    def record(name: str) -> Iterator[None]:
        _, action, subject = name.split("/")
        if action in ("forward", "backward"):
            action = "tile"
        if action in ("start", "wait", "tile"):
            records.setdefault(threading.get_ident(), []).append((runs_in_backward(), f"{action} {subject}"))
        yield

    with pytest.MonkeyPatch.context() as patch:
        nccl = StreamedCollectives()
        use_fake_cuda(nccl, patch)
        recorder = SimpleNamespace(_is_profiler_enabled=True, record_function=record)
        patch.setattr(annotations, "profiler", recorder)

        def adapt(context: AttentionContext) -> AttentionContext:
            ranks[threading.get_ident()] = context.plan.rows.rank
            return replace(context, kernel=TickingKernel(nccl.cuda), num_head_groups=num_head_groups)

        gradients_on_group(CASE, plain, adapt)
    (events,) = (records[thread] for thread, rank in ranks.items() if rank == 1)
    return {
        "forward": [event for backward, event in events if not backward],
        "backward": [event for backward, event in events if backward],
    }
