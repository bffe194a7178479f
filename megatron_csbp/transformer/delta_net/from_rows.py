# SPDX-License-Identifier: Apache-2.0
"""The plan of delta-net layers for the rows of a rank. Pure: no torch, no Megatron."""

from functools import lru_cache

from megatron_csbp.transformer.delta_net.plan import CleanChunk, CorruptedBlock, DeltaNetPlan
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN, Scheme

_MOST_SAMPLES = 64


@lru_cache(maxsize=_MOST_SAMPLES)
def plan_from_rows(rows: RankRows) -> DeltaNetPlan:
    """Return what a rank computes with its rows; for the CP baseline, see `whole_sequence`.

    Raises:
        ValueError: a corrupted block is not on the rank of its chunk (see `Sharding.keeps_blocks_home`).
    """
    sample, sharding = rows.sample, rows.sharding
    chunks, blocks = [], []
    for span in rows.spans:
        if span.copy == CLEAN:
            starts = _document_starts(sample, span.start, span.stop)
            chunks.append(CleanChunk(span.start, span.stop, span.first_row, starts))
        else:
            blocks += [
                CorruptedBlock(start, sample.block_size, span.first_row + start - span.start, span.copy)
                for start in range(span.start, span.stop, sample.block_size)
            ]
    owners = (
        tuple(sharding.owner_of(chunk) for chunk in range(sharding.num_chunks))
        if sharding.scheme is Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
        else ()
    )
    chunks.sort(key=lambda chunk: chunk.start)
    return DeltaNetPlan(rows.num_rows, tuple(chunks), tuple(blocks), owners, rows.rank)


def _document_starts(sample: Sample, start: int, stop: int) -> tuple[int, ...]:
    """Return where documents start that have positions in [start, stop); padding counts as its document's end."""
    starts = sorted({0, *sample.documents[:, 0].tolist()})
    first = max(document for document in starts if document <= start)
    return tuple(document for document in starts if first <= document < stop)


def whole_sequence(rows: RankRows) -> tuple[DeltaNetPlan, tuple[int, ...]]:
    """Return how the CP baseline sees the sequence, which gives every rank all rows of some of the heads.

    Args:
        rows: of a rank, for a sample of one document with all blocks active.

    Returns:
        The plan of all rows, and for each of its rows the row among those gathered rank by rank.
    """
    assert rows.sample.is_static, "the all-to-all takes equally many rows from every rank"
    sample, size = rows.sample, rows.sample.block_size
    spans = sorted(
        (span.copy % (sample.num_views + 1), span.start, rank * rows.num_rows + span.first_row, span.length)
        for rank in range(rows.sharding.group_size)
        for span in rank_rows(sample, rows.sharding, rank).spans
    )  # the clean copy, -1, comes behind all views
    order = tuple(row + offset for _, _, row, length in spans for offset in range(length))
    blocks = tuple(
        CorruptedBlock(start, size, view * sample.length + start, view)
        for view in sample.views
        for start in range(0, sample.length, size)
    )
    chunk = CleanChunk(0, sample.length, sample.num_views * sample.length)
    return DeltaNetPlan(len(order), (chunk,), blocks), order
