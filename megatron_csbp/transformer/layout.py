# SPDX-License-Identifier: Apache-2.0
"""Who owns which positions and blocks. Pure: no torch.distributed, no Megatron.

A sequence of L tokens is held twice: a clean copy and a corrupted copy, cut into L/M diffusion blocks of M tokens.
With a context group of P > 1 ranks the positions are cut into 2P chunks of C = L/(2P) tokens; each rank owns two of
them, in both copies. With the dual-end assignment rank r owns chunks r and 2P-1-r, which is at once the paper's
pairing of block b with block B-1-b and Megatron's zigzag, so causal work is balanced.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt


class Stream(StrEnum):
    """The two copies of a sequence: x0 (clean) and x_t (corrupted)."""

    CLEAN = "clean"
    CORRUPTED = "corrupted"


class Scheme(StrEnum):
    """How one sequence is spread over a context group."""

    SINGLE = "one rank"
    CONTEXT_PARALLEL = "CP"
    BLOCK_PARALLEL = "BP"
    CONTEXT_SHARDED_BLOCK_PARALLEL = "CSBP"


class BlockAssignment(StrEnum):
    """Which two chunks a rank owns: `dual-end` (r and 2P-1-r) or, for ablation, `contiguous` (2r and 2r+1)."""

    DUAL_END = "dual-end"
    CONTIGUOUS = "contiguous"


def resolve_scheme(context_parallel_size: int, block_parallel_size: int) -> Scheme:
    """Return the scheme that a pair of sizes names.

    Args:
        context_parallel_size: value of `--context-parallel-size`.
        block_parallel_size: value of `--block-parallel-size`.

    Raises:
        ValueError: a size is below 1, or both are above 1 and differ.
    """
    for flag, size in (
        ("--context-parallel-size", context_parallel_size),
        ("--block-parallel-size", block_parallel_size),
    ):
        if size < 1:
            raise ValueError(f"{flag} {size} must be at least 1; 1 turns it off.")
    if context_parallel_size == block_parallel_size:
        return Scheme.SINGLE if context_parallel_size == 1 else Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
    if block_parallel_size == 1:
        return Scheme.CONTEXT_PARALLEL
    if context_parallel_size == 1:
        return Scheme.BLOCK_PARALLEL
    raise ValueError(
        f"--block-parallel-size {block_parallel_size} differs from --context-parallel-size {context_parallel_size}: "
        f"both name the same ranks, so above 1 they must be equal. Use --context-parallel-size {block_parallel_size} "
        f"--block-parallel-size {block_parallel_size} for CSBP, or leave one of them at 1 for pure BP or the CP "
        "baseline."
    )


@dataclass(frozen=True)
class Segment:
    """`length` consecutive positions of one copy, held in consecutive local rows from `first_row`."""

    stream: Stream
    first_position: int
    length: int
    first_row: int


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The rows that one rank of a context group holds, in order.

    Row order: corrupted chunk, clean chunk, for the early and then for the late chunk. Each chunk's queries are then
    one contiguous slice and so is each clean chunk that goes on the wire. Pure BP holds its two corrupted chunks and
    then the whole clean copy.

    Attributes:
        sequence_length: L, clean tokens.
        block_size: M, tokens in a diffusion block.
        group_size: P, ranks in the context group.
        rank: r, this rank in the context group.
        scheme: how the sequence is spread.
        assignment: which chunks a rank owns.
    """

    sequence_length: int
    block_size: int
    group_size: int = 1
    rank: int = 0
    scheme: Scheme = Scheme.SINGLE
    assignment: BlockAssignment = BlockAssignment.DUAL_END

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(
                f"--diffusion-block-size {self.block_size} must be at least 1 token; 32 is a usual value."
            )
        if self.group_size < 1 or not 0 <= self.rank < self.group_size:
            raise ValueError(f"rank {self.rank} is not in a context group of {self.group_size} ranks.")
        if (self.group_size == 1) != (self.scheme is Scheme.SINGLE):
            raise ValueError(f"scheme {self.scheme} does not fit a context group of {self.group_size} ranks.")
        multiple = required_multiple(self.block_size, self.group_size)
        if self.sequence_length < multiple or self.sequence_length % multiple:
            raise ValueError(length_error(self.sequence_length, self.block_size, self.group_size))

    @property
    def num_chunks(self) -> int:
        """Chunks that the sequence is cut into: 2P, or 1 on one rank."""
        return 1 if self.group_size == 1 else 2 * self.group_size

    @property
    def chunk_length(self) -> int:
        """C, positions in a chunk."""
        return self.sequence_length // self.num_chunks

    @property
    def num_blocks(self) -> int:
        """B = L/M, diffusion blocks in the sequence."""
        return self.sequence_length // self.block_size

    @property
    def blocks_per_chunk(self) -> int:
        """Diffusion blocks in a chunk."""
        return self.chunk_length // self.block_size

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks that `rank` owns, the early one first."""
        if self.group_size == 1:
            return (0,)
        if self.assignment is BlockAssignment.DUAL_END:
            return (rank, 2 * self.group_size - 1 - rank)
        return (2 * rank, 2 * rank + 1)

    def owner_of(self, chunk: int) -> int:
        """Return the rank that owns a chunk: the inverse of `chunks_of`."""
        assert 0 <= chunk < self.num_chunks, f"chunk {chunk} is not among {self.num_chunks} chunks"
        if self.assignment is BlockAssignment.DUAL_END:
            return min(chunk, self.num_chunks - 1 - chunk)
        return chunk // 2

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that this rank owns."""
        return self.chunks_of(self.rank)

    @property
    def clean_is_replicated(self) -> bool:
        """Whether every rank holds the whole clean copy (pure BP)."""
        return self.scheme is Scheme.BLOCK_PARALLEL

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The local rows as runs of consecutive positions, in row order."""
        chunk = self.chunk_length
        if self.clean_is_replicated:
            runs = [(Stream.CORRUPTED, c * chunk, chunk) for c in self.chunks]
            runs.append((Stream.CLEAN, 0, self.sequence_length))
        else:
            runs = [(stream, c * chunk, chunk) for c in self.chunks for stream in (Stream.CORRUPTED, Stream.CLEAN)]
        segments, row = [], 0
        for stream, position, length in runs:
            segments.append(Segment(stream, position, length, row))
            row += length
        return tuple(segments)

    @property
    def num_rows(self) -> int:
        """S, local rows: 2L/P, or L + L/P for pure BP."""
        return sum(segment.length for segment in self.segments)

    @property
    def group_rows(self) -> int:
        """Rows of all ranks of the context group together: 2L, or (P+1)L for pure BP."""
        return self.group_size * self.num_rows

    def first_row(self, stream: Stream, chunk: int) -> int:
        """Return the local row of the first position of an owned chunk (any chunk, for a replicated clean copy)."""
        position = chunk * self.chunk_length
        for segment in self.segments:
            offset = position - segment.first_position
            if segment.stream is stream and 0 <= offset < segment.length:
                return segment.first_row + offset
        raise KeyError(f"rank {self.rank} holds no {stream} rows of chunk {chunk}")

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """True position of every local row, int64 [S]. Both copies of position i have position i."""
        return np.concatenate([np.arange(s.first_position, s.first_position + s.length) for s in self.segments])

    @cached_property
    def is_corrupted(self) -> npt.NDArray[np.bool_]:
        """Whether a local row belongs to the corrupted copy, bool [S]."""
        return np.concatenate([np.full(s.length, s.stream is Stream.CORRUPTED) for s in self.segments])

    @cached_property
    def is_counted(self) -> npt.NDArray[np.bool_]:
        """Whether a loss on a local row counts here, bool [S]: every row of a copy counts on exactly one rank."""
        return self.is_corrupted | np.isin(self.positions // self.chunk_length, self.chunks)

    @cached_property
    def owned_positions(self) -> npt.NDArray[np.int64]:
        """Positions of the owned chunks in ascending chunk order, int64 [L/P] (L on one rank)."""
        return self.positions[self.is_corrupted]

    def owners(self) -> Iterator[tuple[int, int]]:
        """Yield (block, rank) for every block of the sequence: which rank owns its corrupted copy."""
        for block in range(self.num_blocks):
            yield block, self.owner_of(block // self.blocks_per_chunk)


def required_multiple(block_size: int, group_size: int) -> int:
    """Return the multiple that a sequence length must be of: 2PM, or M on one rank."""
    return block_size if group_size == 1 else 2 * group_size * block_size


def length_error(sequence_length: int, block_size: int, group_size: int) -> str:
    """Return the message for a length that does not divide, with the multiple that is needed and lengths that work."""
    multiple = required_multiple(block_size, group_size)
    below = max(0, sequence_length) // multiple * multiple
    works = " or ".join(str(length) for length in (below, below + multiple) if length > 0)
    rule = f"the diffusion block size {block_size}"
    if group_size > 1:
        rule = (
            f"2 x {group_size} ranks x block size {block_size} = {multiple} "
            "(each rank owns two chunks of whole blocks)"
        )
    return f"--seq-length {sequence_length} must be a multiple of {rule}. Nearest lengths that work: {works}."
