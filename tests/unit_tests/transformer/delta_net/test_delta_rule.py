# SPDX-License-Identifier: Apache-2.0
"""Outputs and all gradients of a delta-net layer against the row-by-row recurrence, on simulated context groups."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_csbp.tools.memory_meter import AllocationMeter, SavedActivations
from megatron_csbp.transformer.delta_net.delta_rule import DeltaHeads
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from tests.support.delta_oracle import DeltaCase, run_on_group, run_on_rank, sequential
from tests.support.simulated_group import SimulatedCollectives

TOLERANCE = 1e-11
DOCUMENTS = (0, 1, 5, 9, 12, 19)
"""Of one block and of several, that end inside a chunk and at its end, or go through several chunks."""

FEW_ACTIVE = tuple(block for block in range(24) if block not in (1, 8, 9, 23))
PARTS = ((1, 1), (2, 4), (4, 8))
"""Ranks and chunks."""

CASES = [
    *(
        DeltaCase(group_size=group_size, block_size=4, blocks_per_chunk=n, slow_decay=slow)
        for group_size, n, slow in product((1, 2, 4), (1, 3, 8), (True, False))
    ),
    *(DeltaCase(group_size=p, block_size=32, blocks_per_chunk=n) for p, n in ((1, 8), (2, 3), (4, 1))),
    *(DeltaCase(group_size=p, block_size=48, blocks_per_chunk=n) for p, n in ((1, 3), (2, 1), (4, 1))),
    DeltaCase(group_size=1, block_size=130, blocks_per_chunk=1),
    DeltaCase(group_size=2, block_size=4, blocks_per_chunk=3, batch=3),
    DeltaCase(group_size=2, block_size=1, blocks_per_chunk=2, views=2),
    *(DeltaCase(group_size=p, views=2, blocks_per_chunk=n) for p, n in ((1, 8), (2, 3), (4, 3))),
    *(DeltaCase(group_size=p, blocks_per_chunk=n, document_blocks=DOCUMENTS) for p, n in ((1, 24), (2, 6), (4, 3))),
    DeltaCase(group_size=4, block_size=1, blocks_per_chunk=2, document_blocks=(0, 1, 5, 6, 13), views=2),
    *(DeltaCase(scheme=Scheme.BLOCK_PARALLEL, group_size=p, views=2, document_blocks=(0, 3)) for p in (2, 4)),
    DeltaCase(assignment=BlockAssignment.CONTIGUOUS, group_size=4, document_blocks=DOCUMENTS),
    *(DeltaCase(group_size=p, blocks_per_chunk=24 // n, document_blocks=DOCUMENTS, padding=3) for p, n in PARTS),
    *(
        DeltaCase(group_size=p, blocks_per_chunk=24 // n, views=2, inactive_blocks=FEW_ACTIVE, document_blocks=(0, 7))
        for p, n in PARTS
    ),
    DeltaCase(group_size=4, blocks_per_chunk=1, inactive_blocks=(0, 7)),
    DeltaCase(scheme=Scheme.BLOCK_PARALLEL, group_size=2, inactive_blocks=(0, 1, 2, 5), padding=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_all_gradients_equal_the_recurrence(
    case: DeltaCase, simulated_collectives: SimulatedCollectives
) -> None:
    problem = case.problem()
    errors = run_on_group(case, problem).errors(sequential(case, problem))
    assert len(errors) == 6
    assert {part: error for part, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("state_bytes", [1, 400])
def test_segments_that_are_computed_again_change_nothing(
    state_bytes: int, simulated_collectives: SimulatedCollectives
) -> None:
    case = DeltaCase(group_size=2, blocks_per_chunk=3, views=2, document_blocks=(0, 2, 5))
    problem = case.problem()
    whole = run_on_group(case, problem)
    segmented = run_on_group(replace(case, state_bytes=state_bytes), problem)
    assert max(segmented.errors(whole).values()) <= 1e-14


def test_the_state_matters(simulated_collectives: SimulatedCollectives) -> None:
    """With slow decay the last block depends on the first: a state that is dropped would be seen."""
    case = DeltaCase(group_size=4)
    problem = case.problem()
    other = replace(problem, qkv=problem.qkv.clone())
    other.qkv[0, : case.block_size] += 1
    change = (run_on_group(case, other).out - run_on_group(case, problem).out)[1, -case.block_size :]
    assert change.abs().max() > 0.01


def test_nothing_leaks(simulated_collectives: SimulatedCollectives) -> None:
    """A changed clean block is seen behind it in its document; a changed corrupted block by itself alone."""
    case = DeltaCase(group_size=2, views=2, document_blocks=(0, 5))
    problem, blocks = case.problem(), case.length // case.block_size
    before = run_on_group(case, problem).out
    for copy, block in product(range(3), (0, 4, 5, blocks - 1)):
        changed = replace(problem, qkv=problem.qkv.clone())
        changed.qkv[copy, block * case.block_size : (block + 1) * case.block_size] += 1
        differs = run_on_group(case, changed).out != before
        seen = differs.unflatten(1, (blocks, case.block_size)).flatten(2).any(2)
        expected = torch.zeros(3, blocks, dtype=torch.bool)
        if copy == 0:
            end = 5 if block < 5 else blocks
            expected[0, block:end] = True
            expected[1:, block + 1 : end] = True
        else:
            expected[copy, block] = True
        assert torch.equal(seen, expected), (copy, block)


def test_states_that_backward_computes_again_are_not_kept(simulated_collectives: SimulatedCollectives) -> None:
    """Besides rows, forward saves the states of all blocks, or only those at the starts of segments."""
    heads = DeltaHeads(key_heads=1, value_heads=1, key_dim=48, value_dim=48)
    case = DeltaCase(group_size=1, block_size=2, blocks_per_chunk=24)
    state_bytes = 48 * 48 * 8

    problem = case.problem(heads=heads)

    def saved_and_peak(bound: int) -> tuple[int, int]:
        kept, alive = SavedActivations(), AllocationMeter()
        with kept, alive:
            run_on_rank(replace(case, state_bytes=bound), problem, 0, None, heads=heads)
        return kept.total_bytes, alive.peak_bytes

    # Segments of four blocks, with a bound of four states in fp32: of 24 states, those at six starts are left.
    (saved_all, peak_of_all), (saved, peak) = (saved_and_peak(bound) for bound in (2**30, 4 * 48 * 48 * 4))
    assert saved_all - saved > 24 * state_bytes
    # Nor are they alive in either pass: with their gradients, those of one segment at a time.
    assert peak_of_all - peak > 24 * state_bytes
