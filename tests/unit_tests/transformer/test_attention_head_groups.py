# SPDX-License-Identifier: Apache-2.0
"""Attention by head groups: the results of one group, the order of the exchange, and what is alive meanwhile."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from megatron_csbp.transformer.layout import Scheme, SequenceLayout, Stream
from torch import Tensor

from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import PendingWork
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel
from tests.support.attention_cases import Attend, Case, gradients_on_group, plain, recomputed, two_layers
from tests.support.dense_oracle import whole_rows
from tests.support.simulated_group import SimulatedCollectives

EXCHANGING = [Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL]
BASE = Case(num_query_heads=8, num_key_value_heads=4, head_dim=4)
CASES = [
    replace(BASE, scheme=Scheme.SINGLE, group_size=1),
    replace(BASE, scheme=Scheme.BLOCK_PARALLEL, group_size=2, micro_batch_size=2),
    *(replace(BASE, clean_attention=mask) for mask in CleanAttention),
    replace(BASE, group_size=4, block_size=1, blocks_per_chunk=5, micro_batch_size=2),
    replace(BASE, group_size=4, block_size=32, blocks_per_chunk=1, clean_attention=CleanAttention.BLOCK_CAUSAL),
    replace(BASE, scheme=Scheme.CONTEXT_PARALLEL, group_size=4, micro_batch_size=2),
]


def in_groups(count: int) -> Callable[[AttentionContext], AttentionContext]:
    return lambda context: replace(context, num_head_groups=count)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_change_no_result(case: Case, simulated_collectives: SimulatedCollectives) -> None:
    expected, exchanges = gradients_on_group(case, two_layers)
    for count in (2, 4):
        got, grouped = gradients_on_group(case, two_layers, in_groups(count))
        # PyTorch's CPU kernel splits its work by the number of heads, so the last bits may differ.
        assert max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)) < 1e-12
        assert grouped == [count * number for number in exchanges]


@pytest.mark.parametrize("scheme", EXCHANGING)
def test_recomputed_groups_need_three_exchanges_each(
    scheme: Scheme, simulated_collectives: SimulatedCollectives
) -> None:
    case = replace(BASE, scheme=scheme)
    expected, exchanges = gradients_on_group(case, plain, in_groups(4))
    got, repeated = gradients_on_group(case, recomputed, in_groups(4))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert exchanges == repeated == [3 * 4 * len(case.plan(0).exchanged_streams)] * 2


def test_half_precision_is_summed_in_fp32_in_every_group(simulated_collectives: SimulatedCollectives) -> None:
    """The sums of a group are copied into the gradient of all heads, so bf16 takes another path than fp64."""

    def bf16(attend: Attend) -> Attend:
        return lambda *inputs: attend(*(tensor.to(torch.bfloat16) for tensor in inputs)).double()

    expected, _ = gradients_on_group(BASE, bf16)
    got, _ = gradients_on_group(BASE, bf16, in_groups(2))
    assert max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)) < 1e-2


@pytest.mark.parametrize("scheme", EXCHANGING)
def test_collectives_are_the_same_on_all_ranks_whatever_the_data(
    scheme: Scheme, simulated_collectives: SimulatedCollectives
) -> None:
    case = replace(BASE, scheme=scheme, group_size=4)
    seen = set()
    for scale in (1.0, 0.0, torch.nan):
        simulated_collectives.payloads.clear()
        gradients_on_group(case, lambda attend, s=scale: lambda q, k, v: attend(q * s, k * s, v * s), in_groups(2))
        for rank in range(4):
            mine = [(name, p.shape) for owner, name, p in simulated_collectives.payloads if owner == rank]
            seen.add(tuple(mine))
    assert len(seen) == 1


@dataclass
class Watcher:
    """A network of copies of this rank that writes down what happens, and which gathered keys are alive then."""

    events: list[str] = field(default_factory=list)
    gathered: list[weakref.ref[Tensor]] = field(default_factory=list)
    gradients: list[weakref.ref[Tensor]] = field(default_factory=list)
    most_gathered: int = 0
    most_gradients: int = 0
    scatters: int = 0

    def look(self) -> None:
        self.most_gathered = max(self.most_gathered, sum(ref() is not None for ref in self.gathered))
        self.most_gradients = max(self.most_gradients, sum(ref() is not None for ref in self.gradients))

    def start_gather(self, tensors: list[Tensor], layout: SequenceLayout, stream: Stream) -> PendingWork[list[Tensor]]:
        number = len(self.gathered)
        rows = layout.num_chunks * layout.chunk_length
        buffers = [torch.randn(rows, *tensor.shape[1:], dtype=tensor.dtype) for tensor in tensors]
        self.gathered.append(weakref.ref(buffers[0]))
        self.events.append(f"gather {number}")
        self.look()

        def finish() -> list[Tensor]:
            self.events.append(f"got {number}")
            return buffers

        return PendingWork([], finish)

    def start_reduce_scatter(
        self, buffers: list[Tensor], layout: SequenceLayout, stream: Stream, payload_dtype: torch.dtype
    ) -> PendingWork[list[Tensor]]:
        number, self.scatters = self.scatters, self.scatters + 1
        self.gradients.append(weakref.ref(buffers[0]))
        self.events.append(f"scatter {number}")
        self.look()

        def finish() -> list[Tensor]:
            self.events.append(f"scattered {number}")
            return [torch.zeros(2, layout.chunk_length, *buffer.shape[1:], dtype=buffer.dtype) for buffer in buffers]

        return PendingWork([], finish)


class WatchedKernel(TorchCpuKernel):
    """Looks at what is alive at every tile."""

    def __init__(self, watcher: Watcher, chunk_length: int) -> None:
        self._watcher, self._chunk_length = watcher, chunk_length

    def forward(self, query: Tensor, *rest: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self._note(query)
        return super().forward(query, *rest, causal=causal, scale=scale)

    def backward(self, grad_out: Tensor, *rest: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        self._note(grad_out)
        return super().backward(grad_out, *rest, causal=causal, scale=scale)

    def _note(self, query_side: Tensor) -> None:
        event = "gathered tiles" if query_side.shape[1] > self._chunk_length else "local tiles"
        if self._watcher.events[-1] != event:
            self._watcher.events.append(event)
        self._watcher.look()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_keys_of_two_groups_at_most_are_alive_and_each_exchange_hides_behind_a_group(
    count: int, dtype: torch.dtype
) -> None:
    plan, watcher = BASE.plan(1), Watcher()
    context = replace(
        BASE.context(1, watcher, WatchedKernel(watcher, plan.layout.chunk_length)), num_head_groups=count
    )
    problem = BASE.problem().to(dtype)
    query, key = (t[whole_rows(plan.layout)].requires_grad_() for t in (problem.query, problem.key))
    out = block_diffusion_attention(query, key, key, context)
    assert watcher.most_gathered == 2
    ahead = [
        event
        for group in range(count)
        for event in ("local tiles", f"got {group}", *([f"gather {group + 1}"] if group + 1 < count else []),
                      "gathered tiles")
    ]  # fmt: skip
    assert watcher.events == ["gather 0", *ahead]

    watcher.events.clear()
    watcher.gathered.clear()
    watcher.most_gathered = 0
    out.sum().backward()
    assert watcher.most_gathered == 2
    # The gradients of one group are on their way while those of the next are added up.
    assert watcher.most_gradients <= 2
    expected = ["gather 0"]
    for group in range(count):
        expected += ["local tiles"]
        expected += [f"scattered {group - 1}"] if group else []
        expected += [f"got {group}"]
        expected += [f"gather {group + 1}"] if group + 1 < count else []
        expected += ["gathered tiles"]
        expected += [f"scatter {group}", "local tiles"]
    expected.append(f"scattered {count - 1}")
    # The local tiles of the last group follow those of the group before without a gather between them.
    assert watcher.events == [event for event, last in zip(expected, ["", *expected], strict=False) if event != last]
