# SPDX-License-Identifier: Apache-2.0
"""The closed form of what delta-net layers move, in figures of a published model."""

import pytest

from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes, break_even_tokens, layer_volumes
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CopyKind, Scheme, Sharding
from megatron_csbp.transformer.traffic_ledger import Content, Direction, Volumes, total

QWEN_27B = DeltaNetSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128)


def volumes(length: int, scheme: Scheme = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, training: bool = False) -> Volumes:
    rows = RankRows(Sample(length, 256), Sharding(8, scheme), rank=3)
    return layer_volumes(1, rows, QWEN_27B, 1, training=training, recomputed=False)


def forward_gib(moved: Volumes, copies: CopyKind | None = None) -> float:
    chosen = (v for t, v in moved.items() if t.direction is Direction.FORWARD and copies in (None, t.copies))
    return total(chosen).remote_bytes / 2**30


def test_state_maps_of_qwen_27b_on_eight_ranks_are_a_twelfth_of_a_gibibyte() -> None:
    moved = volumes(256 * 1024)
    maps = {entry: volume for entry, volume in moved.items() if entry.content is Content.STATE_MAPS}
    assert forward_gib(maps) == pytest.approx(0.0820, abs=0.0001)  # where the reference implementation moves 1.545
    assert forward_gib(moved) == pytest.approx(0.0828, abs=0.0001)  # with the rows that the convolution looks back on


def test_bytes_do_not_depend_on_the_length_and_corrupted_rows_never_move() -> None:
    assert volumes(64 * 1024, training=True) == volumes(256 * 1024, training=True)
    assert {entry.copies for entry in volumes(64 * 1024, training=True)} == {CopyKind.CLEAN}
    assert volumes(64 * 1024, Scheme.BLOCK_PARALLEL, training=True) == {}


def test_the_pass_back_moves_as_much_as_the_forward_pass() -> None:
    moved = total(volumes(64 * 1024, training=True).values()).remote_bytes
    assert moved == 2 * total(volumes(64 * 1024).values()).remote_bytes


def test_the_cp_baseline_moves_every_row_of_both_copies_by_heads() -> None:
    moved = volumes(256 * 1024, Scheme.CONTEXT_PARALLEL)
    # What the clean copy alone takes there (queries, keys, values, gates) and back, in the figures of others: 1.208.
    assert forward_gib(moved, CopyKind.CLEAN) == pytest.approx(0.880 + 0.328, abs=0.001)
    assert forward_gib(moved, CopyKind.CORRUPTED) == forward_gib(moved, CopyKind.CLEAN)


def test_below_the_break_even_length_clean_rows_by_heads_would_move_less() -> None:
    length = break_even_tokens(8, QWEN_27B)
    assert 17_000 < length < 19_000
    by_heads = volumes(256 * 1024, Scheme.CONTEXT_PARALLEL)
    assert forward_gib(by_heads, CopyKind.CLEAN) * length / (256 * 1024) == pytest.approx(forward_gib(volumes(65536)))
