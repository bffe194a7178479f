# SPDX-License-Identifier: Apache-2.0
"""Counts the memory that PyTorch code holds and allocates, on any device, meta included.

What an operator allocates inside, such as the few blocks of a flash kernel, is invisible here.
"""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedActivations:
    """Counts, while it is entered, what forward passes save for their backward passes.

    A storage counts once and as a whole, however many views of it are saved, because that is what stays in memory.

    Attributes:
        storages: bytes of each saved storage.
    """

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that was saved."""
        return sum(self.storages.values())

    def _count(self, tensor: Tensor) -> Tensor:
        # Saved storages stay alive, so no other can get the same key before the backward pass.
        self.storages[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


class AllocationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows, while it is entered, the storages that operators return, until they are freed.

    Attributes:
        live_bytes: bytes of the storages that are alive, of those that were made under this meter.
        peak_bytes: the most that were alive at once.
        largest_elements: elements of the largest storage that was made.
        live: bytes of each storage that is alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and follow what it returns unless it was there before."""
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in given and _key(leaf) not in self.live:
                self._follow(leaf)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = _key(tensor), storage.nbytes()
        self.live[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_elements = max(self.largest_elements, size // tensor.itemsize)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live_bytes -= self.live.pop(key)


def _key(tensor: Tensor) -> int:
    """Return what tells one living storage from another; meta storages have no address of their own."""
    key: int = tensor.untyped_storage()._cdata
    return key
