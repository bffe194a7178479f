# SPDX-License-Identifier: Apache-2.0
"""How many operations one layer launches through Transformer Engine, counted on tensors without memory.

Each costs the host some microseconds, which at 32K is as long as the GPU needs for all of them. Counted are all
operators of PyTorch but views, the fused attention calls, and the fused merges.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_csbp.transformer import softmax_merge
from megatron_csbp.transformer.attention import AttentionContext, attention_backward, attention_forward
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels.transformer_engine import TransformerEngineKernel
from megatron_csbp.transformer.kernels.transformer_engine_adapter import FusedAttention
from megatron_csbp.transformer.tile_executor import KeyValue, QuerySide

HEAD_GROUPS = 4  # the default at these sizes
VIEWS = {"view", "slice", "transpose", "as_strided", "permute", "unsqueeze", "squeeze", "expand", "detach", "alias"}


class Operators(TorchDispatchMode):
    """Counts operators that are no views.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


class FusedCalls:
    """Stands for Transformer Engine's two functions.

    Attributes:
        count: how often they were called.
    """

    def __init__(self) -> None:
        self.count = 0
        self._statistics: dict[tuple[int, ...], Tensor] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, tensor_format: str, **options: Any) -> Any:
        self.count += 1
        problems, rows = query.shape[:2] if tensor_format == "bshd" else (query.shape[1], query.shape[0])
        shape = (problems, query.shape[2], rows, 1)
        return query, self._statistics.setdefault(shape, torch.empty(shape, device="meta"))

    def backward(self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        self.count += 1
        return query, key, value


class Arrived:
    """An exchange that is over as soon as it is started."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result


class NoNetwork:
    """Gives buffers of the right shape."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._rows = plan.clean.num_rows

    def start_gathers(self, tensors: Sequence[Tensor], transfers: Any) -> list[Arrived]:
        return [Arrived([tensor.new_empty(self._rows, *tensor.shape[1:]) for tensor in tensors])]

    def start_reduces(self, *given: Any) -> list[Arrived]:
        return [Arrived(None)]


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The fused merges, one entry a launch."""
    found: list[Any] = []
    fused = SimpleNamespace(merge_fused=lambda *tensors: found.append(tensors))
    monkeypatch.setattr(softmax_merge, "has_fused_merge", lambda device_type: True)
    monkeypatch.setattr(softmax_merge, "importlib", SimpleNamespace(import_module=lambda name: fused))
    return found


# 60 % of 365 + 40 and of 536 + 40, which version 0.1 took at 32K; at 256K what it took, 495 + 52 and 595 + 52.
@pytest.mark.parametrize("length, forward, backward", [(2**15, 243, 345), (2**18, 547, 647)])
def test_a_layer_launches_no_more_than(length: int, forward: int, backward: int, merges: list[Any]) -> None:
    sharding = Sharding(8, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)
    plan = plan_attention(rank_rows(Sample(length, 32), sharding, 7), Mask(CleanAttention.TOKEN_CAUSAL))
    calls = FusedCalls()
    kernel = TransformerEngineKernel(cast(FusedAttention, calls))
    context = AttentionContext(plan, kernel, 0.1, cast(Any, NoNetwork(plan)), HEAD_GROUPS)
    query, key = (
        torch.empty(plan.rows.num_rows, 1, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8)
    )
    with Operators() as operators:
        merged = attention_forward(query, KeyValue(key, key), context)
    assert calls.count == len(plan.local_tiles) + HEAD_GROUPS * len(plan.gathered_tiles)
    assert len(merges) == calls.count - sum(tile.writes_first for tile in plan.tiles)
    assert operators.count + calls.count + len(merges) <= forward
    calls.count = 0
    merges.clear()
    with Operators() as operators:
        attention_backward(QuerySide(query, query, merged), KeyValue(key, key), context)
    assert operators.count + calls.count <= backward
    assert not merges
