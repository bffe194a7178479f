# SPDX-License-Identifier: Apache-2.0
"""One attention layer of one rank without data and without other ranks, to see what it would exchange and allocate.

PyTorch's fake process group starts collectives that talk to nobody, and meta tensors have shapes but no memory, so the
real attention, tiles and exchange run at any size.

Shapes: S local rows, N query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_csbp.tools.flops import ModelShape
from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.torch_kernel import TorchCpuKernel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, what collectives bring from other ranks: from their buffers, not from a plan.

    Attributes:
        remote_bytes: bytes by operator, for example `_allgather_base_`.
    """

    # Which argument holds one share of every rank, and which says how many rows of an all-to-all come from whom.
    _SHARES: Mapping[str, int] = {"_allgather_base_": 0, "alltoall_base_": 0, "_reduce_scatter_base_": 1}
    _COUNTS = 3

    def __init__(self, group_size: int, rank: int) -> None:
        """Take the number of ranks that every collective has, and this one."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.remote_bytes: dict[str, int] = {}
        self._group_size = group_size
        self._rank = rank

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a collective, and run whatever it is."""
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            payload = args[self._SHARES[name]]
            counts = args[self._COUNTS] if name == "alltoall_base_" else []
            rows = sum(counts) or self._group_size
            own = counts[self._rank] if counts else 1
            remote = payload.nbytes // rows * (rows - own)
            self.remote_bytes[name] = self.remote_bytes.get(name, 0) + remote
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_group(size: int, rank: int) -> "Iterator[ProcessGroup]":
    """Make this process one rank of a group whose other ranks do not exist. No other group may be initialised."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def attention_step(
    plan: AttentionPlan,
    shape: ModelShape,
    group: "ProcessGroup",
    device: str = "meta",
    dtype: torch.dtype = torch.bfloat16,
    kernel: AttentionKernel | None = None,
    num_head_groups: int = 1,
) -> Callable[[], None]:
    """Return a function that runs forward and backward of one attention layer on tensors of the plan's rows.

    Args:
        plan: the rank's plan.
        shape: sizes of the model.
        group: the context group.
        device: where the tensors live.
        dtype: of the tensors.
        kernel: computes one tile; PyTorch's CPU flash attention by default.
        num_head_groups: groups of heads that are exchanged and computed one after the other.
    """
    exchange = ContextGroupExchange(group) if plan.exchanges else None
    context = AttentionContext(plan, kernel or TorchCpuKernel(), shape.head_dim**-0.5, exchange, num_head_groups)
    heads = (shape.num_query_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    query_SBND, key_SBKD, value_SBKD = (
        torch.zeros(plan.rows.num_rows, 1, n, shape.head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in heads
    )

    def step() -> None:
        out = block_diffusion_attention(query_SBND, key_SBKD, value_SBKD, context)
        torch.autograd.backward(out, torch.zeros_like(out))

    return step


def exchanged_by_layer(plan: AttentionPlan, shape: ModelShape) -> int:
    """Return the bytes from other ranks in one layer's forward and backward, as its collectives carry them.

    Args:
        plan: the rank's plan.
        shape: sizes of the model.
    """
    size = plan.rows.sharding.group_size
    with fake_group(size, plan.rows.rank) as group:
        step = attention_step(plan, shape, group)
        with CollectiveBytes(size, plan.rows.rank) as collectives:
            step()
    return sum(collectives.remote_bytes.values())
