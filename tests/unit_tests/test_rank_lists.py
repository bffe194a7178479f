# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from tests.support.rank_lists import (
    DEFAULT_RANK_ORDER,
    PIPELINE_BEFORE_DATA_RANK_ORDER,
    RankTopology,
    block_parallel_rank_lists,
)

MEGATRON_ORDERS = (DEFAULT_RANK_ORDER, PIPELINE_BEFORE_DATA_RANK_ORDER)
# Megatron refuses most orders with another axis last, since the expert grid would have other pipeline groups.
PIPELINE_LAST_ORDERS = tuple("-".join((*order, "pp")) for order in itertools.permutations(("tp", "cp", "ep", "dp")))
WORLD_SIZE_LIMIT = 4096


@st.composite
def topologies(draw: st.DrawFn, orders: tuple[str, ...] = MEGATRON_ORDERS) -> RankTopology:
    sizes = {}
    left = WORLD_SIZE_LIMIT
    for axis in draw(st.permutations(("tp", "cp", "pp", "dp"))):
        sizes[axis] = draw(st.integers(1, min(left, 64)))
        left //= sizes[axis]
    return RankTopology(
        world_size=math.prod(sizes.values()),
        tensor_parallel_size=sizes["tp"],
        context_parallel_size=sizes["cp"],
        pipeline_parallel_size=sizes["pp"],
        # Keeps the expert grid's pipeline groups those of the dense grid in every order.
        expert_parallel_size=sizes["cp"],
        order=draw(st.sampled_from(orders)),
    )


def megatron_groups(topology: RankTopology, token: str, *, expert: bool = False) -> list[list[int]]:
    return RankGenerator(
        tp=(topology.expert_tensor_parallel_size if expert else None) or topology.tensor_parallel_size,
        ep=topology.expert_parallel_size if expert else 1,
        dp=topology.expert_data_parallel_size if expert else topology.data_parallel_size,
        pp=topology.pipeline_parallel_size,
        cp=1 if expert else topology.context_parallel_size,
        order=topology.order,
    ).get_ranks(token)


@pytest.mark.parametrize("order", MEGATRON_ORDERS)
@pytest.mark.parametrize(
    "world_size,tp,cp,pp,ep,etp",
    [
        (8, 1, 2, 1, 1, None),
        (16, 2, 2, 2, 4, 1),
        (64, 4, 2, 4, 8, 1),
        (512, 8, 8, 4, 16, 4),
        (4096, 8, 16, 8, 32, 4),
        (4096, 1, 4096, 1, 64, None),
        (4096, 1, 1, 1, 8, None),
        (3072, 2, 3, 8, 6, 1),
    ],
)
def test_every_group_is_megatrons(
    order: str, world_size: int, tp: int, cp: int, pp: int, ep: int, etp: int | None
) -> None:
    if order == PIPELINE_BEFORE_DATA_RANK_ORDER and pp > 1:
        ep = tp * cp // (etp or tp)  # Megatron asks for equal dense and expert data-parallel sizes here
    topology = RankTopology(
        world_size=world_size,
        tensor_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_parallel_size=pp,
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        order=order,
    )
    assert block_parallel_rank_lists(topology, cp) == megatron_groups(topology, "cp")
    for axes in (("tp",), ("dp",), ("pp",), ("dp", "cp"), ("tp", "cp"), ("tp", "pp"), ("tp", "dp", "cp")):
        assert topology.groups(*axes) == megatron_groups(topology, "-".join(axes)), axes
    for axes in (("tp",), ("ep",), ("dp",), ("pp",), ("tp", "ep"), ("tp", "ep", "pp")):
        assert topology.expert_groups(*axes) == megatron_groups(topology, "-".join(axes), expert=True), axes


@settings(max_examples=60, deadline=None)
@given(topologies(orders=PIPELINE_LAST_ORDERS))
def test_block_parallel_groups_are_megatrons_context_groups_in_any_order_of_the_axes(topology: RankTopology) -> None:
    assert block_parallel_rank_lists(topology, topology.context_parallel_size) == megatron_groups(topology, "cp")


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_block_parallel_groups_partition_the_world(topology: RankTopology) -> None:
    groups = block_parallel_rank_lists(topology, topology.context_parallel_size)
    assert {len(group) for group in groups} == {topology.context_parallel_size}
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))


@settings(max_examples=30, deadline=None)
@given(topologies(), st.sampled_from(["tp", "dp", "pp"]))
def test_a_block_parallel_group_meets_a_group_of_another_axis_in_one_rank_at_most(
    topology: RankTopology, axis: str
) -> None:
    group_of_rank = {rank: n for n, group in enumerate(topology.groups(axis)) for rank in group}
    for group in block_parallel_rank_lists(topology, topology.context_parallel_size):
        assert len({group_of_rank[rank] for rank in group}) == len(group)


@settings(max_examples=30, deadline=None)
@given(topologies(orders=(DEFAULT_RANK_ORDER,)))
def test_both_megatron_orders_give_the_same_block_parallel_groups(topology: RankTopology) -> None:
    other = RankTopology(
        world_size=topology.world_size,
        tensor_parallel_size=topology.tensor_parallel_size,
        context_parallel_size=topology.context_parallel_size,
        pipeline_parallel_size=topology.pipeline_parallel_size,
        expert_parallel_size=topology.expert_parallel_size,
        order=PIPELINE_BEFORE_DATA_RANK_ORDER,
    )
    size = topology.context_parallel_size
    assert block_parallel_rank_lists(topology, size) == block_parallel_rank_lists(other, size)


def test_dp4_cp2_bp2_is_eight_ranks() -> None:
    topology = RankTopology(world_size=8, context_parallel_size=2)
    assert topology.data_parallel_size == 4
    assert block_parallel_rank_lists(topology, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_block_parallel_ranks_lie_a_tensor_group_apart() -> None:
    topology = RankTopology(world_size=8, tensor_parallel_size=2, context_parallel_size=2)
    assert block_parallel_rank_lists(topology, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_size_one_leaves_every_rank_alone_whatever_the_context_group() -> None:
    for context_size in (1, 4):
        topology = RankTopology(world_size=4, context_parallel_size=context_size)
        assert block_parallel_rank_lists(topology, 1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "block_size,context_size,works", [(2, 4, "1 or 4"), (8, 4, "1 or 4"), (2, 1, "1"), (0, 4, "1 or 4")]
)
def test_a_block_parallel_size_other_than_one_or_the_context_group_is_refused(
    block_size: int, context_size: int, works: str
) -> None:
    topology = RankTopology(world_size=8, context_parallel_size=context_size)
    with pytest.raises(ValueError, match=rf"--bp-size {block_size}: .* use --bp-size {works}$"):
        block_parallel_rank_lists(topology, block_size)


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"world_size": 6, "context_parallel_size": 4}, r"world size 6: .*--context-parallel-size 4.*start 4 or 8"),
        ({"world_size": 2, "context_parallel_size": 4}, r"world size 2: .*start 4 ranks"),
        ({"world_size": 0}, r"world size 0: .*start 1 ranks"),
        ({"world_size": 4, "tensor_parallel_size": 0}, r"--tensor-model-parallel-size 0: must be at least 1"),
        ({"world_size": 4, "pipeline_parallel_size": -1}, r"--pipeline-model-parallel-size -1: must be at least 1"),
        ({"world_size": 4, "expert_tensor_parallel_size": 0}, r"--expert-tensor-parallel-size 0: must be at least 1"),
        ({"world_size": 6, "expert_parallel_size": 4}, r"world size 6: .*--expert-model-parallel-size 4.*4 or 8"),
        ({"world_size": 4, "order": "tp-cp-dp"}, r"rank order 'tp-cp-dp': .*'tp-cp-ep-pp-dp'"),
        ({"world_size": 4, "order": "tp-cp-ep-dp-dp"}, r"rank order 'tp-cp-ep-dp-dp'"),
        (
            {
                "world_size": 16,
                "context_parallel_size": 2,
                "pipeline_parallel_size": 2,
                "expert_parallel_size": 4,
                "order": PIPELINE_BEFORE_DATA_RANK_ORDER,
            },
            r"--expert-model-parallel-size the value 2 ",
        ),
    ],
)
def test_sizes_that_do_not_fill_the_world_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankTopology(**kwargs)
