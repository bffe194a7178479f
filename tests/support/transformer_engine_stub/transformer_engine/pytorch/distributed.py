# SPDX-License-Identifier: Apache-2.0
"""Classes and functions that Megatron imports by name."""

from contextlib import nullcontext
from typing import Any, NoReturn

activation_recompute_forward = nullcontext


class CudaRNGStatesTracker:
    """Megatron derives its tracker from this."""


def checkpoint(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("Megatron recomputes with its own checkpoint unless FP8 is on")
