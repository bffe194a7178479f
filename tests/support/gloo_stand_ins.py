# SPDX-License-Identifier: Apache-2.0
"""Collectives that Megatron uses and gloo lacks, as the CPU runtime provides them; run on two ranks."""

import torch
import torch.distributed as dist
from torch import Tensor


def check_all(argument: None) -> None:
    """Fail on a wrong result; rank r's inputs are those of rank 0 plus 2r, so that averages are whole numbers."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    assert dist.get_backend() == "gloo"
    group = dist.new_group([0, 1], backend="nccl")
    assert dist.get_backend(group) == "gloo"
    check_averages(group)
    check_coalesced_averages(group)
    check_all_to_all(group)
    dist.destroy_process_group()


def own(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32) + 2 * dist.get_rank()


def check_averages(group: dist.ProcessGroup) -> None:
    tensor = own(0, 1)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
    assert tensor.tolist() == [1, 2]
    tensor = own(0, 1)
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.tolist() == [1, 2]
    tensor = own(0, 1)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2, 4]
    whole, part = own(0, 1, 2, 3), torch.empty(2)
    dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG, group=group)
    assert part.tolist() == ([1, 2] if dist.get_rank() == 0 else [3, 4])
    assert whole.tolist() == own(0, 1, 2, 3).tolist(), "an input is not changed"


def check_coalesced_averages(group: dist.ProcessGroup) -> None:
    """The way of Megatron's gradient buffers."""
    wholes, parts = [own(0, 1), own(4, 5)], [torch.empty(1), torch.empty(1)]
    with dist._coalescing_manager(group, async_ops=True) as manager:  # type: ignore[attr-defined]
        for whole, part in zip(wholes, parts, strict=True):
            dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG, group=group, async_op=True)
    manager.wait()
    assert [part.item() for part in parts] == ([1, 5] if dist.get_rank() == 0 else [2, 6])
    tensors = [own(0, 1), own(4)]
    with dist._coalescing_manager(group):  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
    assert [tensor.tolist() for tensor in tensors] == [[1, 2], [5]]


def check_all_to_all(group: dist.ProcessGroup) -> None:
    """Split sizes as tensors, which Megatron's MoE passes where they are not on a CUDA device."""
    rank = dist.get_rank()
    sent = torch.arange(3.0) + 10 * rank
    splits = torch.tensor([1, 2]) if rank == 0 else torch.tensor([2, 1])
    received = torch.empty(3)
    dist.all_to_all_single(received, sent, output_split_sizes=splits, input_split_sizes=splits, group=group)
    assert received.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 12])
