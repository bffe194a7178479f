# SPDX-License-Identifier: Apache-2.0
"""Attention of a whole simulated context group against the dense oracle: forward and all six gradients.

The six gradients are dq, dk and dv of the clean and of the corrupted copy; each is compared on its own.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.attention import block_diffusion_attention
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, attend_on_group, attend_on_rank
from tests.support.dense_oracle import Problem, Result
from tests.support.simulated_group import SimulatedCollectives

TOLERANCE = 1e-12
PARTS = {f"{copy} {name}" for copy in ("clean", "corrupted") for name in ("out", "dq", "dk", "dv")}
TOPOLOGIES = [(Scheme.SINGLE, 1), *product(DISTRIBUTED_SCHEMES, (2, 4, 8))]
VALUES: dict[str, list[Any]] = {
    "topology": TOPOLOGIES,
    "block_size": [1, 4, 32, 48],
    "blocks_per_chunk": [1, 2, 3, 5, 8],
    "clean_attention": list(CleanAttention),
    "assignment": list(BlockAssignment),
    "heads": [(2, 2), (4, 2), (8, 1)],
    "micro_batch_size": [1, 2],
}


def make_case(values: tuple[Any, ...]) -> Case:
    fields = dict(zip(VALUES, values, strict=True))
    (scheme, group_size), (heads, key_heads) = fields.pop("topology"), fields.pop("heads")
    return Case(
        scheme=scheme,
        group_size=group_size,
        num_query_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=4,
        **fields,
    )


def pairs_of(values: tuple[Any, ...]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(zip(VALUES, values, strict=True), 2))


def cost(case: Case) -> int:
    """Return the elements of the oracle's score matrix."""
    return (2 * case.sequence_length) ** 2 * case.num_query_heads * case.micro_batch_size


def covering_cases() -> list[Case]:
    """Cheap cases in which every two values of different parameters meet at least once."""
    candidates = list(product(*VALUES.values()))
    random.Random(0).shuffle(candidates)
    candidates = [values for values in candidates if cost(make_case(values)) <= 5_000_000]
    candidates.sort(key=lambda values: cost(make_case(values)))
    missing = {pair for values in product(*VALUES.values()) for pair in pairs_of(values)}
    chosen: list[tuple[Any, ...]] = []
    for wanted in range(len(VALUES), 0, -1):  # first the cases that bring many new pairs at once
        for values in candidates:
            if len(pairs_of(values) & missing) >= wanted:
                chosen.append(values)
                missing -= pairs_of(values)
    assert not missing, f"no case has {missing}"
    return [make_case(values) for values in chosen]


def assert_exact(got: Result, expected: Result) -> None:
    errors = got.max_errors(expected)
    assert set(errors) == PARTS
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_forward_and_all_six_gradients_equal_the_dense_oracle(
    case: Case, simulated_collectives: SimulatedCollectives
) -> None:
    problem = case.problem()
    assert_exact(attend_on_group(case, problem), case.dense(problem))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("scheme", DISTRIBUTED_SCHEMES)
def test_reference_kernel_and_both_kinds_of_reduce_scatter_are_exact(
    scheme: Scheme, backend: str, simulated_collectives: SimulatedCollectives
) -> None:
    simulated_collectives.backend = backend
    case = Case(scheme=scheme, group_size=4, micro_batch_size=2)
    problem = case.problem()
    got = attend_on_group(case, problem, kernel=ReferenceKernel())
    assert_exact(got, case.dense(problem))
    names = {name for _, name, _ in simulated_collectives.payloads}
    reduction = "reduce_scatter" if backend == "nccl" else "all_to_all"
    assert names == (set() if scheme is Scheme.BLOCK_PARALLEL else {"all_gather", reduction})


def fused_projection(problem: Problem) -> list[Tensor]:
    """Query, key and value as the views that Megatron splits off one projection."""
    heads = [t.shape[2] for t in (problem.query, problem.key, problem.value)]
    return list(torch.cat([problem.query, problem.key, problem.value], dim=2).split(heads, dim=2))


def strided_heads(problem: Problem) -> list[Tensor]:
    """Query, key and value whose head dim is not contiguous."""
    inputs = (problem.query, problem.key, problem.value)
    return [tensor.transpose(0, 3).contiguous().transpose(0, 3) for tensor in inputs]


@pytest.mark.parametrize("arrange", [fused_projection, strided_heads])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_strided_inputs_and_gradients_are_exact(
    arrange: Callable[[Problem], list[Tensor]], micro_batch_size: int
) -> None:
    case = Case(
        scheme=Scheme.SINGLE,
        group_size=1,
        num_query_heads=4,
        num_key_value_heads=2,
        micro_batch_size=micro_batch_size,
    )
    problem = case.problem()
    # Every element of this gradient is one number in memory, as in the backward of a sum.
    problem = replace(problem, grad_out=torch.ones(1, dtype=torch.float64).expand_as(problem.query))
    inputs = [tensor.requires_grad_() for tensor in arrange(problem)]
    assert not any(tensor.is_contiguous() for tensor in inputs)
    out = block_diffusion_attention(inputs[0], inputs[1], inputs[2], case.context(0, None))
    grads = torch.autograd.grad(out, inputs, problem.grad_out)
    expected = case.dense(problem)
    assert_exact(Result(out.detach(), *grads), expected)


class WholeGroup(torch.autograd.Function):
    """A whole simulated group as one function of whole rows: the ranks run once in each direction."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.case = case
        with torch.enable_grad():
            return attend_on_group(case, Problem(query, key, value, torch.zeros_like(query))).out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        with torch.enable_grad():
            result = attend_on_group(ctx.case, Problem(*ctx.saved_tensors, grad_out))
        return result.dq, result.dk, result.dv, None


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize(
    "scheme, group_size",
    [
        pytest.param(Scheme.SINGLE, 1, marks=pytest.mark.slow),
        *(
            pytest.param(scheme, 2, marks=pytest.mark.slow if scheme is Scheme.CONTEXT_PARALLEL else [])
            for scheme in DISTRIBUTED_SCHEMES
        ),
    ],
)
def test_gradcheck(
    scheme: Scheme,
    group_size: int,
    clean_attention: CleanAttention,
    simulated_collectives: SimulatedCollectives,
) -> None:
    case = Case(
        scheme=scheme,
        group_size=group_size,
        block_size=2,
        blocks_per_chunk=3 if group_size == 1 else 1,
        clean_attention=clean_attention,
        head_dim=1,
    )
    problem = case.problem()
    inputs = [tensor.requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
    assert torch.autograd.gradcheck(lambda *tensors: WholeGroup.apply(*tensors, case), inputs)


@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize("scheme, group_size", [(Scheme.SINGLE, 1), *product(DISTRIBUTED_SCHEMES, [2, 4])])
def test_bf16_errs_at_most_twice_as_much_as_dense_bf16_attention(
    scheme: Scheme,
    group_size: int,
    clean_attention: CleanAttention,
    simulated_collectives: SimulatedCollectives,
) -> None:
    case = Case(
        scheme=scheme,
        group_size=group_size,
        block_size=8,
        blocks_per_chunk=16 if group_size == 1 else 3,
        clean_attention=clean_attention,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    given = case.problem().to(torch.bfloat16)
    exact = case.dense(given.to(torch.float64))
    dense = case.dense(given).max_errors(exact)
    got = attend_on_group(case, given).max_errors(exact)
    assert {part: error / dense[part] for part, error in got.items() if not error <= 2 * dense[part]} == {}


def test_outputs_and_gradients_have_the_dtype_of_the_inputs() -> None:
    case = Case(scheme=Scheme.SINGLE, group_size=1)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        share = attend_on_rank(case, case.problem().to(dtype), case.context(0, None))
        assert {tensor.dtype for tensor in share.parts().values()} == {dtype}


def test_a_second_derivative_is_refused_instead_of_wrong() -> None:
    case = Case(scheme=Scheme.SINGLE, group_size=1)
    problem = case.problem()
    inputs = [tensor.requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
    out = block_diffusion_attention(inputs[0], inputs[1], inputs[2], case.context(0, None))
    (grad, *_) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
