# SPDX-License-Identifier: Apache-2.0
"""How many problems one call of an attention kernel may hold: small blocks make batches that overflow its indices.

Shapes: G independent problems of one tile, T rows, N query heads, D head dim.

* cuDNN: the batch is a dimension of the launch grid, so at most 65,535.
* flash attention: its backward pass adds up the gradient of the query in a buffer [G, N, T rounded up to 128, D] that
  it indexes with 32 bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CUDNN_PROBLEMS = 65_535
_FLASH_ELEMENTS = 2**31
_FLASH_ROWS = 128


def flash_problems(rows: int, num_query_heads: int, head_dim: int) -> int:
    """Return the most problems of one flash call whose backward pass stays within its indices; at least one.

    Args:
        rows: T.
        num_query_heads: N.
        head_dim: D.
    """
    rounded = -(-rows // _FLASH_ROWS) * _FLASH_ROWS
    return max(1, (_FLASH_ELEMENTS - 1) // (rounded * num_query_heads * head_dim))


def in_batches(
    function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], most: int, *, dim: int = 0
) -> tuple[Tensor, ...]:
    """Call a function on at most so many problems at a time, as evenly as that goes, and put its results together.

    Args:
        function: takes these tensors, or as many problems of each.
        tensors: all with G problems in `dim`.
        most: problems of one call.
        dim: where the problems are, in the tensors and in the results.
    """
    problems = tensors[0].shape[dim]
    if problems <= most:
        return function(*tensors)
    calls = -(-problems // most)
    parts = zip(*(tensor.tensor_split(calls, dim) for tensor in tensors), strict=True)
    return tuple(torch.cat(results, dim) for results in zip(*(function(*part) for part in parts), strict=True))
