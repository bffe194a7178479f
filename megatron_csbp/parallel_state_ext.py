# SPDX-License-Identifier: Apache-2.0
"""The block-parallel (BP) dimension beside Megatron's parallel state.

The getters follow `megatron.core.parallel_state` in name and manner. The module keeps one piece of global state, as
Megatron does; layers and kernels take explicit process groups instead of reading it.
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_csbp.rank_lists import (
    DEFAULT_RANK_ORDER,
    RankTopology,
    block_parallel_rank_lists,
    check_block_parallel_size,
)


@dataclass(frozen=True)
class _BlockParallelState:
    """This rank's block-parallel group, and whether we made it (and must destroy it)."""

    group: dist.ProcessGroup
    global_ranks: tuple[int, ...]
    is_owned: bool


_STATE: _BlockParallelState | None = None


def topology_from_megatron(order: str = DEFAULT_RANK_ORDER) -> RankTopology:
    """Return the grid of ranks that Megatron's parallel state was initialised with.

    Args:
        order: The rank order that was given to Megatron, which does not keep it.

    Returns:
        The topology.

    Raises:
        RuntimeError: If Megatron's parallel state is not initialised.
        ValueError: If the sizes do not fit the order.
    """
    if not mpu.model_parallel_is_initialized():
        raise RuntimeError(
            "Megatron's parallel state is not initialized: call initialize_block_parallel after "
            "megatron.core.parallel_state.initialize_model_parallel, or give it context_group and topology"
        )
    return RankTopology(
        world_size=dist.get_world_size(),
        tensor_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        context_parallel_size=mpu.get_context_parallel_world_size(),
        pipeline_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        expert_parallel_size=mpu.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=mpu.get_expert_tensor_parallel_world_size(),
        order=order,
    )


def initialize_block_parallel(
    block_parallel_size: int = 1,
    *,
    context_group: dist.ProcessGroup | None = None,
    topology: RankTopology | None = None,
) -> None:
    """Initialize the block-parallel group of every rank. All ranks must call it, after Megatron's own groups exist.

    Block parallelism lies over the context axis, so the block-parallel group of CSBP and of pure block parallelism
    *is* Megatron's context-parallel group, the same object. A second communicator over the same ranks would cost
    memory on every device (NCCL's buffers) and start-up time, and two communicators over one set of ranks may run
    their collectives in different orders on different ranks and then hang; sharing one gives one order.

    With size 1 the group holds this rank alone. That is the context-parallel group itself when its size is 1. Under
    the context-parallel baseline it is not, and the rank makes a group of one: None would mean the whole world to
    torch.distributed. No other rank takes part in making it and it opens no connection, so it costs nothing at scale.

    Args:
        block_parallel_size: Ranks over which the corrupted blocks are divided: the size of the context group, or 1.
        context_group: The context group of this rank; None for Megatron's context-parallel group.
        topology: The grid of ranks to hold the group against; None for Megatron's sizes in Megatron's default order.
            See `topology_from_megatron` for another order.

    Raises:
        RuntimeError: If the group is already initialized, or Megatron's groups are needed and do not exist.
        ValueError: If block_parallel_size is neither 1 nor the size of the context group, the topology is of another
            world, or the context group holds other ranks than the topology says. Raised before any communication.
    """
    global _STATE
    if _STATE is not None:
        raise RuntimeError("block parallel group is already initialized: call destroy_block_parallel first")
    if topology is None:
        topology = topology_from_megatron()
    if context_group is None:
        context_group = mpu.get_context_parallel_group()
    context_ranks = dist.get_process_group_ranks(context_group)
    check_block_parallel_size(block_parallel_size, len(context_ranks))
    _check_context_ranks(context_ranks, topology)

    rank = dist.get_rank()
    global_ranks = _group_of(block_parallel_rank_lists(topology, block_parallel_size), rank)
    if block_parallel_size == len(context_ranks):
        _STATE = _BlockParallelState(context_group, global_ranks, is_owned=False)
    else:
        alone = dist.new_group([rank], use_local_synchronization=True, group_desc="BLOCK_PARALLEL_GROUP")
        assert isinstance(alone, dist.ProcessGroup), "new_group returns a group to its own members"
        _STATE = _BlockParallelState(alone, global_ranks, is_owned=True)


def destroy_block_parallel() -> None:
    """Forget the block-parallel group, and destroy it if it is not Megatron's. Does nothing if there is none."""
    global _STATE
    state, _STATE = _STATE, None
    # Megatron's own group is Megatron's to destroy, and destroying the world has destroyed ours already.
    if state is not None and state.is_owned and dist.is_initialized():
        dist.destroy_process_group(state.group)


def block_parallel_is_initialized() -> bool:
    """Check if the block-parallel group is initialized."""
    return _STATE is not None


def get_block_parallel_group() -> dist.ProcessGroup:
    """Get the block-parallel group the caller rank belongs to.

    Raises:
        RuntimeError: If it is not initialized.
    """
    return _initialized_state().group


def get_block_parallel_world_size() -> int:
    """Return world size for the block-parallel group.

    Raises:
        RuntimeError: If it is not initialized.
    """
    return len(_initialized_state().global_ranks)


def get_block_parallel_rank() -> int:
    """Return caller's rank in the block-parallel group.

    Raises:
        RuntimeError: If it is not initialized.
    """
    return dist.get_rank(_initialized_state().group)


def get_block_parallel_global_ranks() -> list[int]:
    """Get all global ranks of the block-parallel group that the caller rank belongs to.

    Raises:
        RuntimeError: If it is not initialized.
    """
    return list(_initialized_state().global_ranks)


def _initialized_state() -> _BlockParallelState:
    if _STATE is None:
        raise RuntimeError("block parallel group is not initialized: call initialize_block_parallel first")
    return _STATE


def _check_context_ranks(context_ranks: list[int], topology: RankTopology) -> None:
    if topology.world_size != dist.get_world_size():
        raise ValueError(
            f"the topology is of {topology.world_size} ranks, but {dist.get_world_size()} are running; "
            f"give world_size={dist.get_world_size()}"
        )
    expected = _group_of(topology.groups("cp"), dist.get_rank())
    if tuple(context_ranks) != expected:
        raise ValueError(
            f"rank {dist.get_rank()}: the context group holds the ranks {list(context_ranks)}, but "
            f"--tensor-model-parallel-size {topology.tensor_parallel_size}, the context-group size "
            f"{topology.context_parallel_size} and --pipeline-model-parallel-size {topology.pipeline_parallel_size} "
            f"in the order {topology.order!r} give {list(expected)}; give the order and the sizes that the group was "
            "made with (other axes, such as generalized tensor parallelism, are not supported)"
        )


def _group_of(groups: list[list[int]], rank: int) -> tuple[int, ...]:
    return next(tuple(ranks) for ranks in groups if rank in ranks)
