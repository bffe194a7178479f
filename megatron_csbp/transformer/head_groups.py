# SPDX-License-Identifier: Apache-2.0
"""Key/value heads in groups, each with its query heads: the exchange of one group hides behind another's attention.

Pure: no torch, no Megatron. Heads of different groups never meet, so groups change no result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Below this, starting a collective takes as long as it hides: tens of microseconds, and 32 MiB at 400 GB/s take 80.
_LEAST_GROUP_BYTES = 32 * 2**20
# The first group's gather is all that cannot hide behind a whole group: a quarter of it is little enough.
_MOST_GROUPS = 4
# Recomputation keeps what its forward pass gathered for the backward pass that follows: two groups, then.
_MOST_GROUPS_RECOMPUTED = 2


@dataclass(frozen=True)
class HeadGroup:
    """Heads that are exchanged and computed together.

    Attributes:
        queries: the query heads.
        keys: the key/value heads.
    """

    queries: slice
    keys: slice


def head_groups(num_query_heads: int, num_key_value_heads: int, num_groups: int) -> Sequence[HeadGroup]:
    """Cut the heads of a rank into groups of equal size.

    Args:
        num_query_heads: N, a multiple of K; query head i goes with key/value head i // (N/K).
        num_key_value_heads: K.
        num_groups: G, a divisor of K.
    """
    assert num_key_value_heads % num_groups == 0, f"{num_groups} groups of {num_key_value_heads} key/value heads"
    queries, keys = num_query_heads // num_groups, num_key_value_heads // num_groups
    return [
        HeadGroup(slice(i * queries, (i + 1) * queries), slice(i * keys, (i + 1) * keys)) for i in range(num_groups)
    ]


def default_head_groups(num_key_value_heads: int, clean_bytes: int, *, recomputes: bool) -> int:
    """Choose G from sizes: as many groups as leave enough to hide in each, and as many for CSBP as for CP.

    Args:
        num_key_value_heads: K on this tensor-parallel rank.
        clean_bytes: keys and values of the clean copy that one layer gathers, with all heads; 0 if it gathers none.
        recomputes: whether the attention runs again in the backward pass.
    """
    most = _MOST_GROUPS_RECOMPUTED if recomputes else _MOST_GROUPS
    return max(
        groups
        for groups in range(1, most + 1)
        if groups == 1 or (num_key_value_heads % groups == 0 and clean_bytes // groups >= _LEAST_GROUP_BYTES)
    )
