# SPDX-License-Identifier: Apache-2.0
"""Who can influence whom: no bit of one block may reach a row that the mask hides it from."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention, WindowAnchor
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, attend_on_group
from tests.support.dense_oracle import Problem
from tests.support.simulated_group import SimulatedCollectives
from tests.support.written_out_mask import written_out

M, BLOCKS_PER_CHUNK = 4, 3
TOPOLOGIES = [(Scheme.SINGLE, 1), *product(DISTRIBUTED_SCHEMES, [2])]


@pytest.fixture(params=product(TOPOLOGIES, CleanAttention), ids=lambda p: f"{p[0][0]}-{p[1]}".replace(" ", "_"))
def case(request: pytest.FixtureRequest, simulated_collectives: SimulatedCollectives) -> Case:
    (scheme, group_size), clean_attention = request.param
    blocks = BLOCKS_PER_CHUNK if group_size > 1 else 4 * BLOCKS_PER_CHUNK
    return Case(
        scheme=scheme,
        group_size=group_size,
        block_size=M,
        blocks_per_chunk=blocks,
        clean_attention=clean_attention,
    )


def changed_blocks(case: Case, copy: str, block: int) -> tuple[set[int], set[int]]:
    """Change every query, key and value of one block of one copy; return which blocks' outputs change, by copy."""
    problem, other = case.problem(seed=1), case.problem(seed=2)
    first = block * M + (case.sequence_length if copy == "clean" else 0)

    def changed(tensor: Tensor, new: Tensor) -> Tensor:
        return torch.cat([tensor[:first], new[first : first + M], tensor[first + M :]])

    names = ("query", "key", "value")
    probe = replace(problem, **{name: changed(getattr(problem, name), getattr(other, name)) for name in names})
    differs = (attend_on_group(case, problem).out != attend_on_group(case, probe).out).flatten(1)
    corrupted, clean = differs.any(1).unflatten(0, (2, -1, M)).any(-1)
    return set(corrupted.nonzero().flatten().tolist()), set(clean.nonzero().flatten().tolist())


@pytest.mark.parametrize("block", [0, 4, 11])
def test_a_corrupted_block_reaches_itself_alone(case: Case, block: int) -> None:
    assert changed_blocks(case, "corrupted", block) == ({block}, set())


@pytest.mark.parametrize("block", [0, 4, 11])
def test_a_clean_block_reaches_later_corrupted_blocks_and_no_earlier_block(case: Case, block: int) -> None:
    num_blocks = 4 * BLOCKS_PER_CHUNK
    assert changed_blocks(case, "clean", block) == (set(range(block + 1, num_blocks)), set(range(block, num_blocks)))


@pytest.mark.parametrize("block", [0, 4, 11])
def test_a_loss_on_one_corrupted_block_has_gradients_in_it_and_in_earlier_clean_blocks(case: Case, block: int) -> None:
    problem = case.problem()
    on_block = torch.zeros_like(problem.grad_out)
    rows = slice(block * M, (block + 1) * M)
    on_block[rows] = problem.grad_out[rows]
    result = attend_on_group(case, Problem(problem.query, problem.key, problem.value, on_block))
    for gradient, earlier_clean in ((result.dq, 0), (result.dk, block), (result.dv, block)):
        touched = (gradient != 0).flatten(1).any(1).unflatten(0, (2, -1, M)).any(-1)
        corrupted, clean = (set(copy.nonzero().flatten().tolist()) for copy in touched)
        assert corrupted == {block}
        assert clean == set(range(earlier_clean))


GEOMETRIES: dict[str, dict[str, Any]] = {
    "window": {"window": 7},
    "window at blocks": {"window": 6, "anchor": WindowAnchor.BLOCK},
    "documents": {"documents": ((0, 14), (16, 41))},
    "documents, window, views, chosen blocks": {
        "documents": ((0, 14), (16, 48)),
        "window": 9,
        "num_views": 2,
        "active": ((0, 2, 5, 6, 11), (5, 11)),
    },
}


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("scheme, group_size", TOPOLOGIES)
def test_a_change_reaches_the_rows_that_see_it_and_no_bit_of_another(
    scheme: Scheme,
    group_size: int,
    geometry: str,
    clean_attention: CleanAttention,
    simulated_collectives: SimulatedCollectives,
) -> None:
    """Change all keys and values of a block of one copy: outputs change in the rows that see it, and only there."""
    blocks = BLOCKS_PER_CHUNK if group_size > 1 else 4 * BLOCKS_PER_CHUNK
    case = Case(
        scheme=scheme,
        group_size=group_size,
        block_size=M,
        blocks_per_chunk=blocks,
        clean_attention=clean_attention,
        **GEOMETRIES[geometry],
    )
    length, views = case.sequence_length, case.num_views
    rows = [(copy, position) for copy in (*range(views), CLEAN) for position in range(length)]
    sees = torch.from_numpy(written_out(case.sample, case.mask, rows))
    active = torch.from_numpy(case.sample.active_blocks.repeat(M, axis=1)).flatten()
    exists = torch.cat([active, torch.ones(length, dtype=torch.bool)])
    problem, other = case.problem(seed=1), case.problem(seed=2)
    out = attend_on_group(case, problem).out
    for copy, block in ((views, 1), (views, 5), (0, 5)):
        first = copy * length + block * M
        changed = slice(first, first + M)
        key, value = problem.key.clone(), problem.value.clone()
        key[changed], value[changed] = other.key[changed], other.value[changed]
        probed = attend_on_group(case, replace(problem, key=key, value=value)).out
        differs = (probed != out).flatten(1).any(1)
        expected = sees[:, changed].any(1) & exists
        assert expected.any()
        assert torch.equal(differs, expected)
