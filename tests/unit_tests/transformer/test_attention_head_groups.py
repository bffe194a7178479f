# SPDX-License-Identifier: Apache-2.0
"""Attention by head groups: the results of one group, the order of the exchange, and what is alive meanwhile."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.attention import AttentionContext, _shares, block_diffusion_attention
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from tests.support.attention_cases import Attend, Case, gradients_on_group, plain, recomputed, two_layers
from tests.support.copying_exchange import CopyingExchange, tell_tiles
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
    assert exchanges == repeated == [3 * 4 * len(case.plan(0).transfers)] * 2


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
    """Writes down what happens, and which gathered keys and their gradients are alive then."""

    events: list[str] = field(default_factory=list)
    keys: list[weakref.ref[Tensor]] = field(default_factory=list)
    gradients: list[weakref.ref[Tensor]] = field(default_factory=list)
    most_keys: int = 0
    most_gradients: int = 0
    under_way: int = 0
    most_under_way: int = 0

    def exchange(self) -> CopyingExchange:
        return CopyingExchange(self.tell, self.gathered, self.given)

    def tell(self, event: str) -> None:
        self.events.append(event.removesuffix(" clean"))
        self.under_way += 1 if event.startswith("start") else -1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.look()

    def tile(self, event: str) -> None:
        if self.events[-1] != f"{event}s":
            self.events.append(f"{event}s")
        self.look()

    def gathered(self, buffers: Sequence[Tensor]) -> None:
        self.keys.append(weakref.ref(buffers[0]))
        self.look()

    def given(self, buffers: Sequence[Tensor]) -> None:
        self.gradients.append(weakref.ref(buffers[0]))
        self.look()

    def look(self) -> None:
        self.most_keys = max(self.most_keys, sum(ref() is not None for ref in self.keys))
        self.most_gradients = max(self.most_gradients, sum(ref() is not None for ref in self.gradients))


@pytest.mark.parametrize("blocks", [3, 8, 16, 512])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_local_tiles_are_dealt_in_order_and_no_share_is_empty_if_there_are_enough(count: int, blocks: int) -> None:
    tiles = replace(BASE, blocks_per_chunk=blocks).plan(1).local_tiles
    shares = _shares(tiles, count)
    assert len(shares) == count
    assert [tile for share in shares for tile in share] == list(tiles)
    assert sum(map(bool, shares)) == min(count, len(tiles))
    if len(tiles) > 2 * count:
        largest = max(tile.num_pairs for tile in tiles)
        assert max(sum(tile.num_pairs for tile in share) for share in shares) <= (
            sum(tile.num_pairs for tile in tiles) / count + largest
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_keys_of_two_groups_at_most_are_alive_and_each_exchange_hides_behind_a_group(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, watcher = BASE.plan(1), Watcher()
    tell_tiles(watcher.tile, monkeypatch)
    context = replace(BASE.context(1, watcher.exchange()), num_head_groups=count)
    problem = BASE.problem().to(dtype)
    query, key = (t[whole_rows(plan.rows)].requires_grad_() for t in (problem.query, problem.key))
    out = block_diffusion_attention(query, key, key, context)
    assert watcher.most_keys == 2
    expected = ["start gather", "local tiles"]
    for group in range(count):
        expected += ["wait gather", *(["start gather"] if group + 1 < count else []), "gathered tiles"]
    assert watcher.events == expected
    assert watcher.most_under_way == 1

    watcher.events.clear()
    watcher.keys.clear()
    watcher.most_keys = 0
    out.sum().backward()
    assert watcher.most_keys <= 2
    assert watcher.most_gradients <= 2
    # One collective at a time (local tiles are dealt by their work, so a large one may leave a group without):
    # gathers beside tiles with gathered keys, sums of gradients beside local tiles.
    beside = _shares(plan.backward_local_tiles[1], count)
    assert sum(map(bool, beside)) >= 2
    assert watcher.most_under_way == 1
    expected = ["start gather", "local tiles", "wait gather", *(["start gather"] if count > 1 else [])]
    for group in range(count):
        expected += ["gathered tiles", *(["wait gather"] if group + 1 < count else [])]
        expected += ["start scatter", *(["local tiles"] if beside[group] else []), "wait scatter"]
        expected += ["start gather"] if group + 2 < count else []
    assert watcher.events == expected
