# SPDX-License-Identifier: Apache-2.0
"""Lengths that cuDNN's attention is not trusted with unless a mask says where they end.

On Hopper its backward walks keys in groups of 128 rows. Where a length ends within a group, some versions take the
rows beyond it, filled with zeros, for keys: for a query whose log-sum-exp is below -88.7 = -ln(largest fp32 number)
they weigh infinitely much, and its gradient is NaN. Random data never shows it; heads with massive activations do.
Public reports: NVIDIA/cudnn-frontend issues 160 and 1072 and pull request 628, pytorch/pytorch issue 196678. By these,
a padding mask avoids it, and flash attention does not have it.

Blocks of 32 or 64 tokens make many small tiles of such lengths.
"""

_GROUP_ROWS = 128


def ends_within_a_group(rows: int, keys: int) -> bool:
    """Return whether a tile's rows or keys end within a group of cuDNN's.

    Args:
        rows: T, query rows.
        keys: U.
    """
    return rows % _GROUP_ROWS != 0 or keys % _GROUP_ROWS != 0
