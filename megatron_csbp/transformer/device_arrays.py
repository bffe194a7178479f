# SPDX-License-Identifier: Apache-2.0
"""Index arrays of a plan on the device that they are used on; copied there once for each array."""

import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_copies: dict[tuple[int, torch.device], Tensor] = {}


def on_device(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`; the copy lives as long as the array, which must not change.

    Args:
        array: int64.
        device: where the tensor is used.
    """
    key = (id(array), device)
    copy = _copies.get(key)
    if copy is None:
        host = torch.from_numpy(array)
        copy = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
        _copies[key] = copy
        weakref.finalize(array, _copies.pop, key, None)
    return copy
