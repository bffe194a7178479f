# SPDX-License-Identifier: Apache-2.0
"""Attention with windows, documents, views and chosen blocks against the dense oracle: forward and all gradients."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron_csbp.transformer.attention import AttentionContext
from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention, WindowAnchor
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, attend_on_group, gradients_on_group, plain
from tests.support.simulated_group import SimulatedCollectives

CSBP, CP, BP = Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, Scheme.CONTEXT_PARALLEL, Scheme.BLOCK_PARALLEL
M, BLOCKS = 4, 2
DOCUMENTS: dict[str, Callable[[int], tuple[tuple[int, int], ...]]] = {
    "two": lambda length: ((0, length // 2 - 1), (length // 2, length)),
    "short ones": lambda length: tuple((start, start + 1 + start % 3) for start in range(0, length, M)),
    "padding around": lambda length: ((M, length // 2 + 1), (length - 2 * M, length - M - 2)),
}


def one_rank(case: Case) -> Case:
    """The same length on one rank."""
    return replace(case, scheme=Scheme.SINGLE, group_size=1, blocks_per_chunk=case.sequence_length // case.block_size)


def assert_exact(case: Case) -> None:
    problem = case.problem()
    errors = attend_on_group(case, problem).max_errors(case.dense(problem), case.num_views)
    assert len(errors) == 8
    assert {part: error for part, error in errors.items() if not error <= 1e-12} == {}


def window_cases() -> list[Case]:
    """All notable windows with both anchors, on 1, 2, 4 and 8 ranks; what else there is changes along the way."""
    rng, cases = random.Random(0), []
    for size in (1, 2, 4, 8):
        chunk = M * BLOCKS
        length = 2 * chunk * size
        for window in (1, 7, M, 3 * M + 5, chunk, 2 * chunk + 1, length):
            cases += [
                Case(
                    scheme=CSBP if size > 1 else Scheme.SINGLE,
                    group_size=size,
                    block_size=M,
                    blocks_per_chunk=BLOCKS if size > 1 else 2 * BLOCKS,
                    clean_attention=rng.choice(list(CleanAttention)),
                    assignment=rng.choice(list(BlockAssignment)),
                    num_query_heads=4,
                    num_key_value_heads=rng.choice([1, 2, 4]),
                    head_dim=4,
                    micro_batch_size=rng.choice([1, 2]),
                    num_views=rng.choice([1, 2]),
                    window=window,
                    anchor=anchor,
                )
                for anchor in WindowAnchor
            ]
    return cases


def sample_cases() -> list[Case]:
    """Documents and active blocks in every scheme."""
    rng, cases = random.Random(1), []
    for size, schemes in ((1, (Scheme.SINGLE,)), (2, DISTRIBUTED_SCHEMES), (4, DISTRIBUTED_SCHEMES), (8, (CSBP,))):
        length = 2 * BLOCKS * M * max(size, 2)
        blocks = length // M
        choices = [None, (), (blocks // 3,), tuple(range(0, blocks, 2)), (0, 1)]
        for scheme in schemes:
            for name in (None, *DOCUMENTS):
                for chosen in choices:
                    if (name is None and chosen is None) or (size == 8 and name == "short ones"):
                        continue
                    views = rng.choice([1, 2])
                    cases.append(
                        Case(
                            scheme=scheme,
                            group_size=size,
                            block_size=M,
                            blocks_per_chunk=BLOCKS if size > 1 else blocks,
                            clean_attention=rng.choice(list(CleanAttention)),
                            assignment=rng.choice(list(BlockAssignment)),
                            num_query_heads=4,
                            num_key_value_heads=rng.choice([1, 2]),
                            head_dim=4,
                            num_views=views,
                            window=rng.choice([None, None, 1, M + 1, 3 * M + 5]),
                            anchor=rng.choice(list(WindowAnchor)),
                            documents=None if name is None else DOCUMENTS[name](length),
                            active=None if chosen is None else (chosen, (blocks - 1,))[:views],
                        )
                    )
    return cases


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("case", window_cases(), ids=str)
def test_windows_are_exact(case: Case, backend: str, simulated_collectives: SimulatedCollectives) -> None:
    if backend == "nccl" and not (case.plan(0).exchanges and case.group_size < 8):
        pytest.skip("the network makes no difference")
    simulated_collectives.backend = backend
    assert_exact(case)


@pytest.mark.parametrize("scheme", [CP, BP])
@pytest.mark.parametrize("window", [1, 7, 17])
def test_windows_are_exact_in_the_other_schemes(
    window: int, scheme: Scheme, simulated_collectives: SimulatedCollectives
) -> None:
    for anchor in WindowAnchor:
        assert_exact(Case(scheme=scheme, group_size=4, blocks_per_chunk=2, window=window, anchor=anchor))


@pytest.mark.parametrize("case", sample_cases(), ids=str)
def test_documents_and_chosen_blocks_are_exact(case: Case, simulated_collectives: SimulatedCollectives) -> None:
    assert_exact(case)


def test_twenty_documents_are_exact(simulated_collectives: SimulatedCollectives) -> None:
    rng = random.Random(2)
    documents = tuple((4 * M * n, 4 * M * n + rng.randint(1, 4 * M)) for n in range(20))
    for window in (None, 9):
        assert_exact(Case(group_size=2, block_size=M, blocks_per_chunk=20, documents=documents, window=window))


@pytest.mark.parametrize("scheme", [CP, CSBP])
@pytest.mark.parametrize(
    "changes",
    [{"window": 13, "anchor": WindowAnchor.BLOCK}, {"documents": ((0, 30), (32, 48)), "active": ((2, 3, 9),)}],
    ids=["window", "documents"],
)
def test_head_groups_of_ranges_change_no_result(
    changes: dict[str, object], scheme: Scheme, simulated_collectives: SimulatedCollectives
) -> None:
    case = Case(scheme=scheme, num_query_heads=8, num_key_value_heads=4, head_dim=4, **changes)  # type: ignore[arg-type]
    expected, exchanges = gradients_on_group(case, plain)
    for count in (2, 4):

        def grouped(context: AttentionContext, count: int = count) -> AttentionContext:
            return replace(context, num_head_groups=count)

        got, started = gradients_on_group(case, plain, grouped)
        assert max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)) < 1e-12
        assert started == [count * number for number in exchanges]


@pytest.mark.parametrize("window", [None, 9])
def test_padding_changes_no_bit_of_a_real_row(window: int | None, simulated_collectives: SimulatedCollectives) -> None:
    """Rows of padding hold anything, those in the last block of a document too."""
    case = Case(group_size=2, blocks_per_chunk=3, documents=((0, 10), (16, 30), (40, 45)), window=window)
    problem, other = case.problem(seed=1), case.problem(seed=2)
    real = torch.zeros(case.sequence_length, dtype=torch.bool)
    for start, stop in case.documents or ():
        real[start:stop] = True
    whole = real.repeat(2)
    names = ("query", "key", "value")
    mixed = {
        name: torch.where(whole[:, None, None, None], getattr(problem, name), getattr(other, name)) for name in names
    }
    silent = problem.grad_out * whole[:, None, None, None]
    expected = attend_on_group(case, replace(problem, grad_out=silent))
    got = attend_on_group(case, replace(problem, grad_out=silent, **mixed))
    for part in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, part)[whole], getattr(expected, part)[whole]), part
    for part in ("dk", "dv"):
        assert not getattr(got, part)[~whole].any(), "padding has no gradient"


@pytest.mark.parametrize("changes", [{}, {"window": 9, "documents": ((0, 20), (20, 48))}], ids=["static", "ranges"])
def test_the_last_writers_give_the_bits_of_a_cast_at_the_end(
    changes: dict[str, object], simulated_collectives: SimulatedCollectives
) -> None:
    case = Case(**changes)  # type: ignore[arg-type]

    def unmarked(context: AttentionContext) -> AttentionContext:
        tiles = tuple(replace(tile, writes_last=False) for tile in context.plan.gathered_tiles)
        rows = ((0, context.plan.rows.num_rows),)
        return replace(context, plan=replace(context.plan, gathered_tiles=tiles, unfinished=rows))

    def half(attend: object) -> object:
        return lambda *inputs: attend(*(tensor.bfloat16() for tensor in inputs)).double()  # type: ignore[operator]

    expected, _ = gradients_on_group(case, half, unmarked)  # type: ignore[arg-type]
    got, _ = gradients_on_group(case, half)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_cases_meet_every_collective() -> None:
    met = {case.plan(0).clean.lowering for case in [*window_cases(), *sample_cases()]}
    assert met == set(Lowering)
    single = one_rank(Case())
    assert plan_attention(single.rows(0), single.mask).clean.lowering is Lowering.NOTHING
