# SPDX-License-Identifier: Apache-2.0
"""Samples of packed documents that stand for all of a job's. Pure.

Packed samples differ in documents, in blocks with corrupted rows, and so in rows, bytes and time. A plan takes two of
those that it has looked at: the median one for time, bytes and operations, and the one with most rows for memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_csbp.transformer.geometry.layer_plans import layer_plans, rank_rows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding
from megatron_csbp.transformer.geometry.visibility import Mask


@dataclass(frozen=True, eq=False)
class PackedSample:
    """One sample of packed documents.

    Attributes:
        sample: documents, and the blocks with corrupted rows.
        loss_rows: expected rows with loss, of all copies.
        most_loss_rows: rows that may carry loss, of all copies.
    """

    sample: Sample
    loss_rows: int
    most_loss_rows: int

    @property
    def rows(self) -> int:
        """Rows of all copies."""
        return rank_rows(self.sample, Sharding(), 0).num_rows

    @property
    def active(self) -> int:
        """Blocks with corrupted rows, of all views."""
        return int(self.sample.active_blocks.sum())

    def in_words(self) -> str:
        """Return what it is made of."""
        blocks = self.sample.num_blocks * self.sample.num_views
        return (
            f"{len(self.sample.documents)} documents, corrupted rows for {self.active:,} of {blocks:,} blocks, "
            f"{self.rows:,} rows"
        )


@dataclass(frozen=True, eq=False)
class PackedSamples:
    """The samples that a plan looks at.

    Attributes:
        number: how many were looked at.
        median: the one with the median number of rows.
        fullest: the one with most rows.
    """

    number: int
    median: PackedSample
    fullest: PackedSample


def representatives(samples: Sequence[PackedSample]) -> PackedSamples:
    """Return the samples that stand for all of these, of which there is at least one."""
    by_rows = sorted(samples, key=lambda sample: sample.rows)
    return PackedSamples(len(by_rows), by_rows[(len(by_rows) - 1) // 2], by_rows[-1])


def busiest_rank(sample: Sample, sharding: Sharding, mask: Mask | None) -> int:
    """Return the rank of a context group that computes most of a sample.

    Args:
        sample: the sample.
        sharding: how it is spread.
        mask: of layers that attend, whose pairs count; None: the rows count, which memory goes by.
    """

    def work(rank: int) -> int:
        plans = layer_plans(sample, sharding, rank)
        return plans.rows.num_rows if mask is None else plans.plan(mask).num_pairs

    return max(range(sharding.group_size), key=work)
