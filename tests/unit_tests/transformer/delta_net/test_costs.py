# SPDX-License-Identifier: Apache-2.0
"""Costs of a delta-net layer: what PyTorch counts, the closed form of the traffic, figures of a published model."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_csbp.transformer.delta_net.convolution import ShortConvolution
from megatron_csbp.transformer.delta_net.costs import (
    flops_of_ranks,
    layer_bytes,
    layer_flops,
    layer_parameters,
    state_memory,
)
from megatron_csbp.transformer.delta_net.delta_rule import (
    STATE_BYTES,
    DeltaHeads,
    DeltaNetContext,
    block_diffusion_delta_rule,
)
from megatron_csbp.transformer.delta_net.from_rows import plan_from_rows
from megatron_csbp.transformer.delta_net.torch_kernel import TorchDeltaRule
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes, layer_volumes
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.traffic_ledger import total
from tests.support.delta_oracle import DeltaCase

QWEN_27B = DeltaNetSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
HIDDEN = 5120
SMALL = DeltaNetSizes(key_heads=2, value_heads=4, key_dim=6, value_dim=5)
CSBP, BP, CP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL


class NobodyElse:
    """An exchange that brings as much as it would, from nobody."""

    def gather(self, own: torch.Tensor, plan: object, content: object) -> torch.Tensor:
        return own.new_zeros(len(plan.owners), *own.shape[1:])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "case",
    [
        DeltaCase(group_size=1, block_size=8, blocks_per_chunk=3),
        DeltaCase(group_size=4, block_size=8, views=2, batch=3),
        DeltaCase(group_size=4, block_size=100, blocks_per_chunk=1),
        DeltaCase(group_size=4, inactive_blocks=(0, 1, 5, 9), document_blocks=(0, 2, 3)),
        DeltaCase(group_size=2, scheme=BP, block_size=8),
    ],
    ids=str,
)
def test_operations_are_what_pytorch_counts(case: DeltaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the projections; PyTorch's counter does not know triangular solves, which are counted here."""
    solves = []
    solve = torch.linalg.solve_triangular

    def counted(matrix: torch.Tensor, right: torch.Tensor, **options: bool) -> torch.Tensor:
        # Row i of n takes i products and i sums for each right-hand side, and no division: the diagonal is of ones.
        solves.append(matrix.shape[:-2].numel() * sum(2 * row for row in range(matrix.shape[-1])) * right.shape[-1])
        return solve(matrix, right, **options)

    monkeypatch.setattr(torch.linalg, "solve_triangular", counted)
    rows, rank = case.rows(case.group_size - 1), case.group_size - 1
    plan, _ = case.plan(rank)
    expected = layer_flops(rows, SMALL, HIDDEN, case.batch)
    heads = DeltaHeads(SMALL.key_heads, SMALL.value_heads, SMALL.key_dim, SMALL.value_dim)
    qkv = torch.randn(rows.num_rows, case.batch, SMALL.channels)
    gates = torch.rand(2, rows.num_rows, case.batch, SMALL.value_heads)
    convolution = ShortConvolution(torch.randn(SMALL.channels, SMALL.look_back + 1))
    context = DeltaNetContext(plan, TorchDeltaRule(), NobodyElse())
    with FlopCounterMode(display=False) as counter:
        block_diffusion_delta_rule(qkv, -gates[0], gates[1], convolution, heads, context)
    assert counter.get_total_flops() == expected.convolution + expected.rule + expected.maps
    assert expected.solves == sum(solves)
    assert expected.total == counter.get_total_flops() + expected.projections + expected.solves
    assert (expected.maps > 0) == (rows.sharding.scheme is CSBP)


def test_projections_and_parameters_are_those_of_linear_layers() -> None:
    rows = DeltaCase(group_size=1).rows(0)
    linear = [torch.nn.Linear(HIDDEN, SMALL.features, bias=False), torch.nn.Linear(20, HIDDEN, bias=False)]
    with FlopCounterMode(display=False) as counter:
        for module in linear:
            module(torch.randn(rows.num_rows, module.in_features))
    assert layer_flops(rows, SMALL, HIDDEN).projections == counter.get_total_flops()
    convolution = torch.nn.Conv1d(SMALL.channels, SMALL.channels, 4, groups=SMALL.channels, bias=False)
    weights = sum(parameter.numel() for module in (*linear, convolution) for parameter in module.parameters())
    assert layer_parameters(SMALL, HIDDEN) == weights + 4 + 4 + 5  # A_log, dt_bias, norm of a head


@pytest.mark.parametrize("scheme", [CSBP, BP, CP])
@pytest.mark.parametrize("recomputed", [True, False])
def test_bytes_are_those_of_the_traffic_s_closed_form(scheme: Scheme, recomputed: bool) -> None:
    """Which tests of the exchange hold against ledger and wire."""
    rows = RankRows(Sample(65_536, 256), Sharding(8, scheme), 5)
    moved = layer_bytes(rows, QWEN_27B, 2, recomputed=recomputed)
    volumes = layer_volumes(1, rows, QWEN_27B, 2, training=True, recomputed=recomputed)
    assert moved.forward + moved.backward == total(volumes.values()).remote_bytes
    assert moved.backward == (2 if recomputed else 1) * moved.forward
    assert layer_bytes(rows, QWEN_27B, 2, training=False).backward == 0


def test_the_cp_baseline_computes_all_rows_with_its_share_of_the_heads() -> None:
    """Which is what CSBP computes, but for the maps."""
    sample = Sample(4096, 64)
    by_heads, csbp = (layer_flops(RankRows(sample, Sharding(4, scheme), 1), QWEN_27B, HIDDEN) for scheme in (CP, CSBP))
    assert (by_heads.rule, by_heads.convolution, by_heads.maps) == (csbp.rule, csbp.convolution, 0)
    assert by_heads.projections == csbp.projections


def test_active_blocks_at_home_make_ranks_unequal_by_what_is_said() -> None:
    """All on one rank: its work is that of a full sample, the others' that of clean rows alone."""
    active = np.zeros((1, 64), dtype=bool)
    active[0, [*range(8, 16), *range(48, 56)]] = True  # chunks 1 and 6 of eight, which rank 1 of 4 owns
    few, none, every = (Sample(4096, 64, active=mask) for mask in (active, np.zeros_like(active), None))
    sharding = Sharding(4, CSBP)
    found, idle, busy = (flops_of_ranks(sample, sharding, QWEN_27B, HIDDEN) for sample in (few, none, every))
    assert found[1] == busy[1]
    assert [found[rank] for rank in (0, 2, 3)] == [idle[rank] for rank in (0, 2, 3)]
    assert 1.5 < found[1].total / found[0].total < 2


def test_a_layer_of_qwen_27b_has_its_published_parameters() -> None:
    matrices = HIDDEN * (2 * 2048 + 2 * 6144 + 2 * 48) + 6144 * HIDDEN
    assert layer_parameters(QWEN_27B, HIDDEN) == matrices + 10_240 * 4 + 2 * 48 + 128


def test_states_of_qwen_27b_at_256k_are_3_mib_a_block_and_bounded() -> None:
    """With blocks of 256 on eight ranks: 384 MiB a layer, of which 256 MiB are alive unless more is asked for."""
    rows = RankRows(Sample(262_144, 256), Sharding(8, CSBP), 2)
    mib = 2**20
    for kernel in ("fla", "torch"):
        memory = state_memory(rows, QWEN_27B, STATE_BYTES, kernel=kernel)  # type: ignore[arg-type]
        assert memory.all_bytes == 128 * 3 * mib
        assert memory.alive_bytes <= 256 * mib
        assert memory.segments > 1
        assert memory.kept_bytes == memory.segments * 2 * 9 * mib  # a state and a map for each of two chunks
    asked = state_memory(rows, QWEN_27B, 4096 * mib, kernel="fla")
    assert (asked.segments, asked.kept_bytes) == (1, asked.alive_bytes)
    assert asked.alive_bytes == 5 * asked.all_bytes


def test_the_bound_is_the_one_that_the_layer_keeps() -> None:
    case = DeltaCase(group_size=1, block_size=2, blocks_per_chunk=24)
    sizes = DeltaNetSizes(key_heads=1, value_heads=1, key_dim=48, value_dim=48)
    state = 48 * 48 * 4
    memory = state_memory(case.rows(0), sizes, 4 * state, kernel="torch")
    assert plan_from_rows(case.rows(0)).steps == 24
    assert (memory.segments, memory.alive_bytes, memory.kept_bytes) == (6, 4 * state, 6 * state)
