# SPDX-License-Identifier: Apache-2.0
"""Values that are a view of the fused projection are saved without it, and where that saves little, not copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_csbp.transformer.attention import block_diffusion_attention
from megatron_csbp.transformer.geometry.scheme import Scheme
from tests.support.attention_cases import Case


@dataclass
class Saved:
    """Storages that were saved for backward, by address, with their bytes."""

    storages: dict[int, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages


@contextmanager
def saved_for_backward() -> Iterator[Saved]:
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        saved.tensors.append(tensor)  # kept, so that no two storages have one address
        saved.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def fused_projection(case: Case) -> Tensor:
    """Return [S, B, K, (N/K + 2) D], as Megatron's fused projection is: per key head its queries, key and value."""
    widths = case.num_query_heads // case.num_key_value_heads + 2
    rows = case.rows(0).num_rows
    generator = torch.Generator().manual_seed(0)
    shape = (rows, case.micro_batch_size, case.num_key_value_heads, widths * case.head_dim)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def split(case: Case, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value; the first two are copies, as the position embedding makes them."""
    query, key, value = fused.split([fused.shape[-1] - 2 * case.head_dim, case.head_dim, case.head_dim], dim=-1)
    query = query.reshape(*query.shape[:2], case.num_query_heads, case.head_dim)
    return query * 1.0, key * 1.0, value


# 2 and 8 of 10: the projection has (N/K + 2) times the bytes of the values.
@pytest.mark.parametrize("num_query_heads, num_key_value_heads", [(2, 2), (8, 2)])
def test_values_are_saved_without_the_fused_projection(num_query_heads: int, num_key_value_heads: int) -> None:
    case = Case(
        scheme=Scheme.SINGLE,
        group_size=1,
        micro_batch_size=2,
        num_query_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
    )
    fused = fused_projection(case)
    query, key, value = split(case, fused)
    assert value.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr(), "a view, as in training"
    with saved_for_backward() as saved:
        block_diffusion_attention(query, key, value, case.context(0, None))
    assert saved.holds(query)
    assert saved.holds(key)
    assert not saved.holds(fused)
    # Query, output, key, value, and the log-sum-exp.
    elements = 2 * query.numel() + 2 * key.numel() + query.numel() // case.head_dim
    assert sum(saved.storages.values()) == 8 * elements


@pytest.mark.parametrize("of_a_pair", [False, True], ids=["alone", "half of a pair"])
def test_values_that_are_most_of_their_memory_are_not_copied(of_a_pair: bool) -> None:
    case = Case(scheme=Scheme.SINGLE, group_size=1)
    query, key, _ = split(case, fused_projection(case))
    pair = torch.randn(*key.shape[:3], 2 * case.head_dim, dtype=torch.float64, requires_grad=True)
    value = pair[..., case.head_dim :] if of_a_pair else torch.randn_like(key).requires_grad_()
    with saved_for_backward() as saved:
        block_diffusion_attention(query, key, value, case.context(0, None))
    assert saved.holds(value)


def test_the_copy_changes_neither_output_nor_the_gradient_of_the_projection() -> None:
    case = Case(scheme=Scheme.SINGLE, group_size=1, num_query_heads=8, num_key_value_heads=2, micro_batch_size=2)
    results = []
    for own_memory in (False, True):
        fused = fused_projection(case)
        query, key, value = split(case, fused)
        out = block_diffusion_attention(query, key, value * 1.0 if own_memory else value, case.context(0, None))
        (grad,) = torch.autograd.grad(out, fused, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        results.append((out.detach(), grad))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
