# SPDX-License-Identifier: Apache-2.0
"""Cuts what a run of rows sees into rectangles and triangles: every allowed pair once, no other. Pure.

A run is a stretch of consecutive positions of one copy and one document, in whole blocks, within one chunk. Its keys
are cut at the base, the later of the chunk's and the document's start:

1. Own block: a corrupted block x itself; block-causal, a clean block x itself.
2. Diagonal: token-causal clean rows x clean keys from the base on. Triangles.
3. Staircase: rows of a block x strictly earlier blocks from the base on. Block i meets block j < i at the level of the
   highest bit in which i and j differ: at level l the blocks whose bit l is set meet the 2^l blocks below. Each run of
   keys is met once by all the blocks above it, whichever of them are active.
4. Before the base: all that lies between lo and the base. Without a window it is one rectangle.

With a window rows are cut into pieces of about w rows, each with its own base; below that base the lower edge of the
window is a rectangle and an anticausal triangle (or, where the window is anchored at blocks, a staircase upside down).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_csbp.transformer.geometry.batches import Piece
from megatron_csbp.transformer.geometry.key_map import KeyMap, KeyRun
from megatron_csbp.transformer.geometry.rows import RankRows, Span
from megatron_csbp.transformer.geometry.scheme import CLEAN
from megatron_csbp.transformer.geometry.tiles import KeySource, MaskKind
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, raw_lower


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one copy, one chunk and one document, in whole blocks.

    Attributes:
        corrupted: whether they belong to a view.
        row: first local row.
        start: first position.
        stop: first position behind, a multiple of the block size.
        document: first position of the document.
        document_stop: first position behind it; the last block may reach further.
        base: the later of the document's and the chunk's first position.
    """

    corrupted: bool
    row: int
    start: int
    stop: int
    document: int
    document_stop: int
    base: int


def runs_of(rows: RankRows, span: Span) -> Iterator[Run]:
    """Yield the runs of one span; padding between documents is in none."""
    chunk_start = span.start if span.copy == CLEAN else span.chunk * rows.chunk_length
    for document, document_stop, aligned in rows.sample.documents_within(span.start, span.stop):
        start, stop = max(document, span.start), min(aligned, span.stop)
        yield Run(
            span.copy != CLEAN,
            span.first_row + start - span.start,
            start,
            stop,
            document,
            document_stop,
            max(document, chunk_start),
        )


def pieces_of_run(run: Run, block: int, mask: Mask, keys: KeyMap) -> Iterator[Piece]:
    """Yield rectangles and triangles that cover what a run's rows see.

    Args:
        run: the rows.
        block: M.
        mask: of the layer.
        keys: where clean keys lie.
    """
    if run.corrupted or mask.clean_attention is CleanAttention.BLOCK_CAUSAL:
        yield from _own_blocks(run, block, mask, keys)
        if mask.window is None:
            yield from _staircase(run.row, run.start, run.stop, run.base, block, keys)
            yield from _rectangles(run.row, run.stop - run.start, run.document, run.base, keys)
        else:
            yield from _windowed(run, block, mask, keys, max(block, mask.window // block * block), _stairs)
    elif mask.window is None:
        yield from _triangle(run.row, run.stop - run.start, run.start, keys)
        yield from _rectangles(run.row, run.stop - run.start, run.document, run.base, keys)
    else:
        yield from _windowed(run, block, mask, keys, mask.window, _diagonal)


def _own_blocks(run: Run, block: int, mask: Mask, keys: KeyMap) -> Iterator[Piece]:
    """Each block x itself; the document's last block has keys up to the document's end only."""
    count = (run.stop - run.start) // block
    last = min(run.stop, run.document_stop) - (run.stop - block)
    groups = [(0, count, block)] if last == block else [(0, count - 1, block), (count - 1, 1, last)]
    for first, number, num_keys in groups:
        if not number:
            continue
        row, position = run.row + first * block, run.start + first * block
        key = row if run.corrupted else keys.local(position)
        if run.corrupted or mask.window is None or mask.window >= block:
            piece = Piece(KeySource.LOCAL, MaskKind.FULL, row, block, key, num_keys, (), True, run.corrupted)
            yield from piece.repeated(number, block, block)
            continue
        # Clean rows whose window is shorter than their block do not see all of it.
        key_run = KeyRun(KeySource.LOCAL, key, position, position + num_keys)
        for piece in _lower_edge(row, block, position - mask.window + 1, 1, position, key_run, block):
            yield from piece.repeated(number, block, block)


def _staircase(row: int, start: int, stop: int, base: int, block: int, keys: KeyMap) -> Iterator[Piece]:
    """Rows of blocks [start, stop) x the strictly earlier blocks from the base on, level by level."""
    first, last = (start - base) // block, (stop - base) // block
    if last <= 1:
        return
    origin = keys.home(base)
    width = 1
    while width < last:
        # Runs of blocks with this bit set begin at odd multiples of the width.
        odd = (first // width) | 1
        while odd * width < last:
            begin, end = max(first, odd * width), min(last, (odd + 1) * width)
            whole = 1
            if end - begin == width:
                whole = (last // width - odd + 1) // 2
            step = 2 * width * block
            yield Piece(
                origin.source,
                MaskKind.FULL,
                row + (begin - first) * block,
                (end - begin) * block,
                origin.row + (odd - 1) * width * block,
                width * block,
                ((whole, step, step),) if whole > 1 else (),
            )
            odd += 2 * whole
        width *= 2


def _rectangles(row: int, num_rows: int, start: int, stop: int, keys: KeyMap) -> Iterator[Piece]:
    """Rows x all clean keys of [start, stop), which may lie in several places."""
    for key in keys.anywhere(start, stop):
        yield Piece(key.source, MaskKind.FULL, row, num_rows, key.row, key.length)


def _triangle(row: int, num_rows: int, start: int, keys: KeyMap) -> Iterator[Piece]:
    """Clean rows from position `start` x themselves, causal."""
    yield Piece(KeySource.LOCAL, MaskKind.CAUSAL, row, num_rows, keys.local(start), num_rows, (), True)


type _Upper = Callable[[int, int, int, int, KeyMap], Iterator[Piece]]
"""Yields what rows see from their piece's base on: (row, base, stop, block, keys)."""


def _stairs(row: int, base: int, stop: int, block: int, keys: KeyMap) -> Iterator[Piece]:
    return _staircase(row, base, stop, base, block, keys)


def _diagonal(row: int, base: int, stop: int, block: int, keys: KeyMap) -> Iterator[Piece]:
    return _triangle(row, stop - base, base, keys)


def _windowed(run: Run, block: int, mask: Mask, keys: KeyMap, length: int, upper: _Upper) -> Iterator[Piece]:
    """Cut a run into pieces of `length` rows, so short that each row of a piece sees its base (or nothing below)."""
    assert mask.window is not None
    whole = (run.stop - run.start) // length
    if whole:
        for piece in upper(run.row, run.start, run.start + length, block, keys):
            yield from piece.repeated(whole, length, length)
    rest = run.start + whole * length
    if rest < run.stop:
        yield from upper(run.row + whole * length, rest, run.stop, block, keys)

    step = block if run.corrupted and mask.anchors_at_blocks else 1
    # From this piece on, the whole window lies within the document and the chunk's own keys: all are alike.
    alike = -(-(run.base + mask.window - 1 - run.start) // length) if keys.holds(run.base) else whole
    number, position = 0, run.start
    while position < run.stop:
        stop = min(position + length, run.stop)
        count = whole - number if alike <= number < whole else 1
        lower = raw_lower(position, position, mask, run.corrupted)
        for key in keys.in_order(max(lower, run.document), position, run.base):
            row = run.row + position - run.start
            for piece in _lower_edge(row, stop - position, lower, step, run.document, key, block):
                yield from piece.repeated(count, length, length)
        position += count * length
        number += count


def _lower_edge(
    row: int, num_rows: int, lower: int, step: int, document: int, key: KeyRun, block: int
) -> Iterator[Piece]:
    """Rows x the keys of one run that are not below their lower bound.

    Row i sees the run's positions from lower + (i // step) * step on, and from the document's start on.
    """

    def piece(mask: MaskKind, first: int, rows: int, start: int, stop: int) -> Iterator[Piece]:
        if rows > 0 and stop > start:
            yield Piece(key.source, mask, row + first, rows, key.row + start - key.start, stop - start)

    start = max(document, key.start)
    # Steps whose bound is at or below the start, and steps that see any key at all.
    constant = max(0, min(-(-num_rows // step), (start - lower) // step + 1))
    seeing = max(0, min(-(-num_rows // step), -(-(key.stop - lower) // step)))
    if seeing <= constant:
        yield from piece(MaskKind.FULL, 0, min(num_rows, seeing * step), start, key.stop)
        return
    last = lower + (seeing - 1) * step  # the bound of the last step that sees a key
    if step > 1:
        yield from piece(MaskKind.FULL, 0, min(num_rows, seeing * step), last, key.stop)
        yield from piece(MaskKind.FULL, 0, constant * step, start, last)
        yield from _inverted_staircase(row + constant * step, seeing - 1 - constant, last, block, key)
        return
    if constant and lower + constant - 1 == start:
        constant -= 1  # this row is the first of the triangle as well
    if key.stop - last == 1:  # the last row sees one key: it ends the triangle
        yield from piece(MaskKind.FULL, 0, constant, start, key.stop)
        yield from piece(MaskKind.ANTICAUSAL, constant, seeing - constant, lower + constant, key.stop)
        return
    yield from piece(MaskKind.FULL, 0, seeing, last, key.stop)
    yield from piece(MaskKind.FULL, 0, constant, start, last)
    yield from piece(MaskKind.ANTICAUSAL, constant, seeing - 1 - constant, lower + constant, last)


def _inverted_staircase(row: int, blocks: int, stop: int, block: int, key: KeyRun) -> Iterator[Piece]:
    """The last of these blocks sees one block of keys before `stop`, the one before it two, and so on."""
    # Counted from the end, the blocks 1, 2, ... see as many blocks of keys: a staircase with one more block.
    width, last = 1, blocks + 1
    while width < last:
        whole, rest = divmod(last, 2 * width)
        groups = [(2 * whole - 1, width, whole)] if whole else []
        if rest > width:
            groups.append((2 * whole + 1, rest - width, 1))
        for odd, height, count in groups:
            end = odd * width + height
            key_row = key.row + stop - odd * width * block - key.start
            piece = Piece(
                key.source, MaskKind.FULL, row + (last - end) * block, height * block, key_row, width * block
            )
            yield from piece.repeated(count, 2 * width * block, 2 * width * block)
        width *= 2
