# SPDX-License-Identifier: Apache-2.0
"""How slow a link must be, so that these processor cores stand to it as an H200 stands to its own links.

The numbers of the H200 are inputs, from its data sheet and published kernel benchmarks; those of this machine are
measured.
"""

from dataclasses import dataclass

H200_ATTENTION_FLOPS = 600e12
"""FLOP/s that attention, forward and backward, reaches with bf16 and head dim 128. The peak is 989e12 (data sheet,
dense); FlashAttention-3's benchmarks give about 650e12 forward and 550e12 backward on the same chip (H100 SXM)."""
H200_NVLINK_BYTES = 450e9
"""Bytes per second and direction between two GPUs of a node: NVLink 4, 900 GB/s both ways."""
H200_NETWORK_BYTES = 50e9
"""Bytes per second and direction between GPUs of two nodes: one 400 Gbit/s port a GPU."""
H200_ITEMSIZE = 2
"""bf16."""


@dataclass(frozen=True)
class Link:
    """A link of the cluster that is imitated.

    Attributes:
        name: for tables.
        cluster_bytes: bytes per second and direction there; None: as fast as this machine's kernel can.
    """

    name: str
    cluster_bytes: float | None

    def scaled_bytes(self, core_flops: float, itemsize: int) -> float | None:
        """Return the bytes per second that this link must have here.

        A core that is slower by some factor gets a link that moves fewer *elements* by the same factor.

        Args:
            core_flops: attention FLOP/s that one rank reaches here.
            itemsize: bytes of an element here.
        """
        if self.cluster_bytes is None:
            return None
        return self.cluster_bytes * (core_flops / H200_ATTENTION_FLOPS) * (itemsize / H200_ITEMSIZE)


ACROSS_NODES = Link("across nodes", H200_NETWORK_BYTES)
NVLINK = Link("NVLink", H200_NVLINK_BYTES)
UNLIMITED = Link("unlimited", None)
