# SPDX-License-Identifier: Apache-2.0
"""One spawn of four gloo ranks collects facts about several topologies; the tests judge them."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_csbp import parallel_state_ext as bp
from tests.support.gloo_ranks import facts_of_ranks
from tests.support.rank_lists import (
    DEFAULT_RANK_ORDER,
    PIPELINE_BEFORE_DATA_RANK_ORDER,
    RankTopology,
    block_parallel_rank_lists,
)

WORLD_SIZE = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """What Megatron and the block-parallel dimension are initialised with."""

    block_size: int
    cp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    order: str = DEFAULT_RANK_ORDER
    pass_group: bool = False


CASES = {
    "csbp4": Case(block_size=4, cp=4),
    "tp2_csbp2": Case(block_size=2, cp=2, tp=2),
    "dp2_csbp2_explicit_group": Case(block_size=2, cp=2, pass_group=True),
    "pp2_csbp2": Case(block_size=2, cp=2, pp=2),
    "pp2_csbp2_pipeline_before_data": Case(block_size=2, cp=2, pp=2, ep=2, order=PIPELINE_BEFORE_DATA_RANK_ORDER),
    "ep2_dp2_csbp2": Case(block_size=2, cp=2, ep=2),
    "tp2_csbp2_data_before_context": Case(block_size=2, cp=2, order="dp-cp-tp-ep-pp"),
    "cp4_baseline": Case(block_size=1, cp=4),
    "one_rank_each": Case(block_size=1, cp=1),
}
ALIASED = [name for name, case in CASES.items() if case.block_size == case.cp]


def topology_of(case: Case) -> RankTopology:
    return RankTopology(
        world_size=WORLD_SIZE,
        tensor_parallel_size=case.tp,
        context_parallel_size=case.cp,
        pipeline_parallel_size=case.pp,
        expert_parallel_size=case.ep,
        order=case.order,
    )


def initialize_megatron(case: Case) -> None:
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        order=case.order,
        create_gloo_process_groups=False,
    )


def is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except KeyError:  # torch forgets the ranks of a destroyed group
        return False
    return True


def facts_of(case: Case) -> dict[str, Any]:
    initialize_megatron(case)
    context_group = mpu.get_context_parallel_group()
    was_initialized = bp.block_parallel_is_initialized()
    bp.initialize_block_parallel(
        case.block_size,
        context_group=context_group if case.pass_group else None,
    )
    group = bp.get_block_parallel_group()
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    facts = {
        "initialized_before_and_after": [was_initialized, bp.block_parallel_is_initialized()],
        "is_context_group": group is context_group,
        "sum_over_group": total.item(),
        "world_size": bp.get_block_parallel_world_size(),
        "group_size": group.size(),
        "rank": bp.get_block_parallel_rank(),
        "global_ranks": bp.get_block_parallel_global_ranks(),
    }
    bp.destroy_block_parallel()
    facts["initialized_before_and_after"].append(bp.block_parallel_is_initialized())
    facts["alive_after_destroy"] = {"block": is_alive(group), "context": is_alive(context_group)}
    mpu.destroy_model_parallel()
    return facts


def error_of(case: Case) -> str:
    """Initialise Megatron with the case, and return what the block-parallel dimension objects to."""
    initialize_megatron(case)
    try:
        bp.initialize_block_parallel(case.block_size)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mpu.destroy_model_parallel()
    return "no error"


def collect() -> dict[str, Any]:
    facts: dict[str, Any] = {name: facts_of(case) for name, case in CASES.items()}
    facts["unequal_sizes"] = error_of(Case(block_size=2, cp=4))
    facts["block_size_without_context_group"] = error_of(Case(block_size=4, cp=1))
    bp.initialize_block_parallel(context_group=dist.group.WORLD)
    facts["global_ranks_without_megatron"] = bp.get_block_parallel_global_ranks()
    try:
        bp.initialize_block_parallel()
    except RuntimeError as error:
        facts["second_initialization"] = str(error)
    dist.destroy_process_group()
    bp.destroy_block_parallel()
    facts["initialized_at_the_end"] = bp.block_parallel_is_initialized()
    return facts


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return facts_of_ranks(collect, WORLD_SIZE, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_in_the_group_that_the_rank_lists_name(facts: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    for ranks in block_parallel_rank_lists(topology_of(case), case.block_size):
        for position, rank in enumerate(ranks):
            fact = facts[rank][name]
            assert fact["global_ranks"] == ranks
            assert fact["rank"] == position
            assert fact["world_size"] == fact["group_size"] == case.block_size
            assert fact["sum_over_group"] == sum(ranks)


@pytest.mark.parametrize("name", ALIASED)
def test_a_group_over_the_context_ranks_is_megatrons_context_group_itself(
    facts: list[dict[str, Any]], name: str
) -> None:
    assert all(fact[name]["is_context_group"] for fact in facts)


def test_the_context_parallel_baseline_has_a_group_of_its_own_on_every_rank(facts: list[dict[str, Any]]) -> None:
    assert not any(fact["cp4_baseline"]["is_context_group"] for fact in facts)


@pytest.mark.parametrize("name", CASES)
def test_the_dimension_exists_between_initialize_and_destroy_only(facts: list[dict[str, Any]], name: str) -> None:
    assert all(fact[name]["initialized_before_and_after"] == [False, True, False] for fact in facts)


@pytest.mark.parametrize("name", CASES)
def test_destroy_takes_our_own_group_and_leaves_megatrons(facts: list[dict[str, Any]], name: str) -> None:
    for fact in facts:
        assert fact[name]["alive_after_destroy"] == {"block": name in ALIASED, "context": True}


def test_destroying_the_world_first_is_fine(facts: list[dict[str, Any]]) -> None:
    assert not any(fact["initialized_at_the_end"] for fact in facts)


def test_a_context_group_is_enough_without_megatrons_state(facts: list[dict[str, Any]]) -> None:
    assert [fact["global_ranks_without_megatron"] for fact in facts] == [[0], [1], [2], [3]]


def test_a_second_initialization_is_refused(facts: list[dict[str, Any]]) -> None:
    assert all("already initialized" in fact["second_initialization"] for fact in facts)


@pytest.mark.parametrize(
    "name,start,end",
    [
        ("unequal_sizes", "ValueError: --bp-size 2: ", "use --bp-size 1 or 4"),
        ("block_size_without_context_group", "ValueError: --bp-size 4: ", "use --bp-size 1"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    facts: list[dict[str, Any]], name: str, start: str, end: str
) -> None:
    for fact in facts:
        assert fact[name].startswith(start)
        assert fact[name].endswith(end)


def test_the_getters_refuse_before_initialization() -> None:
    assert not bp.block_parallel_is_initialized()
    for getter in (
        bp.get_block_parallel_group,
        bp.get_block_parallel_world_size,
        bp.get_block_parallel_rank,
        bp.get_block_parallel_global_ranks,
    ):
        with pytest.raises(RuntimeError, match="block parallel group is not initialized"):
            getter()


def test_initialization_before_megatrons_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"after megatron\.core\.parallel_state\.initialize_model_parallel"):
        bp.initialize_block_parallel(2)


def test_destroy_without_a_group_does_nothing() -> None:
    bp.destroy_block_parallel()
    assert not bp.block_parallel_is_initialized()
