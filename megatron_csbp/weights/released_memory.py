# SPDX-License-Identifier: Apache-2.0
"""Gives tensors back as soon as they are written or read.

PyTorch's `save` and `load` leave each tensor in a cycle of references, where it stays until Python happens to look for
such cycles: that may be after many layers.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator

_OFTEN_BYTES = 32 * 2**20


@contextlib.contextmanager
def released_memory() -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes of each tensor before the next one is made.

    What exists at the start is left out of the search, which is then quick.
    """
    gc.collect()
    gc.freeze()
    passed = 0

    def done(size_bytes: int) -> None:
        nonlocal passed
        passed += size_bytes
        if passed >= _OFTEN_BYTES:
            gc.collect()
            passed = 0

    try:
        yield done
    finally:
        gc.unfreeze()
