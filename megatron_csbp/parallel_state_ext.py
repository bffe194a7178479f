# SPDX-License-Identifier: Apache-2.0
"""The block-parallel (BP) dimension beside Megatron's parallel state.

The getters follow `megatron.core.parallel_state` in name and manner. Block parallelism lies over the context axis, so
the block-parallel group of CSBP and of pure block parallelism *is* Megatron's context-parallel group, the same object:
a second communicator over the same ranks would cost memory on every device and could run its collectives in another
order on another rank. Layers and kernels take explicit process groups instead of reading this state.
"""

import torch.distributed as dist
from megatron.core import parallel_state as mpu

_GROUP: dist.ProcessGroup | None = None
_IS_OWNED = False
"""Whether the group was made here, and so has to be destroyed here."""


def initialize_block_parallel(block_parallel_size: int = 1, *, context_group: dist.ProcessGroup | None = None) -> None:
    """Initialize the block-parallel group of every rank. All ranks must call it, after Megatron's own groups exist.

    With size 1 the group holds this rank alone; making it takes no other rank and opens no connection.

    Args:
        block_parallel_size: ranks over which the corrupted blocks are divided: the size of the context group, or 1.
        context_group: the context group of this rank; None for Megatron's context-parallel group.

    Raises:
        RuntimeError: the group is initialized already, or Megatron's groups are needed and do not exist.
        ValueError: the size is neither 1 nor that of the context group; raised before any communication.
    """
    global _GROUP, _IS_OWNED
    if _GROUP is not None:
        raise RuntimeError("block parallel group is already initialized: call destroy_block_parallel first")
    if context_group is None:
        if not mpu.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's parallel state is not initialized: call initialize_block_parallel after "
                "megatron.core.parallel_state.initialize_model_parallel, or give it context_group"
            )
        context_group = mpu.get_context_parallel_group()
    size = context_group.size()
    if block_parallel_size not in (1, size):
        works = "1" if size == 1 else f"1 or {size}"
        raise ValueError(
            f"--bp-size {block_parallel_size}: block parallelism lies over the same ranks as context parallelism, so "
            f"its size is 1 or that of the context group, here {size}; use --bp-size {works}"
        )
    _IS_OWNED = block_parallel_size != size
    _GROUP = context_group
    if _IS_OWNED:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="BLOCK_PARALLEL_GROUP")
        assert isinstance(alone, dist.ProcessGroup), "new_group returns a group to its own members"
        _GROUP = alone


def destroy_block_parallel() -> None:
    """Forget the block-parallel group, and destroy it if it is not Megatron's. Does nothing if there is none."""
    global _GROUP
    group, _GROUP = _GROUP, None
    # Destroying the world has destroyed all groups already.
    if group is not None and _IS_OWNED and dist.is_initialized():
        dist.destroy_process_group(group)


def block_parallel_is_initialized() -> bool:
    """Check if the block-parallel group is initialized."""
    return _GROUP is not None


def get_block_parallel_group() -> dist.ProcessGroup:
    """Get the block-parallel group the caller rank belongs to.

    Raises:
        RuntimeError: it is not initialized.
    """
    if _GROUP is None:
        raise RuntimeError("block parallel group is not initialized: call initialize_block_parallel first")
    return _GROUP


def get_block_parallel_world_size() -> int:
    """Return world size for the block-parallel group."""
    return get_block_parallel_group().size()


def get_block_parallel_rank() -> int:
    """Return caller's rank in the block-parallel group."""
    return get_block_parallel_group().rank()


def get_block_parallel_global_ranks() -> list[int]:
    """Get all global ranks of the block-parallel group that the caller rank belongs to."""
    ranks: list[int] = dist.get_process_group_ranks(get_block_parallel_group())
    return ranks
