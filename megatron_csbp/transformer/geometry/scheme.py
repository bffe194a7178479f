# SPDX-License-Identifier: Apache-2.0
"""How a sequence is spread over a context group: schemes, chunks and their owners. Pure.

With P > 1 ranks the L positions are cut into 2P chunks of C = L/(2P); each rank owns two. Dual-end gives rank r the
chunks r and 2P-1-r, which is at once the paper's pairing of block b with block B-1-b (arXiv 2609.19242) and Megatron's
zigzag, so causal work is balanced.
"""

from dataclasses import dataclass
from enum import StrEnum

CLEAN = -1
"""Number of the clean copy; the corrupted copies are the views 0, 1, ..."""


class CopyKind(StrEnum):
    """The two kinds of copies of a sequence: x0 (clean) and x_t (corrupted; one or more views)."""

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


def resolve_scheme(context_parallel_size: int, block_parallel_size: int, context_scheme: str | None = None) -> Scheme:
    """Return the scheme that the flags name.

    Args:
        context_parallel_size: value of `--context-parallel-size`.
        block_parallel_size: value of `--block-parallel-size`.
        context_scheme: value of `--context-scheme`; the CP baseline must be asked for by name.

    Raises:
        ValueError: a size is below 1, both are above 1 and differ, or it is unclear whether the baseline is meant.
    """
    for flag, size in (
        ("--context-parallel-size", context_parallel_size),
        ("--block-parallel-size", block_parallel_size),
    ):
        if size < 1:
            raise ValueError(f"{flag} {size} must be at least 1; 1 turns it off.")
    if context_scheme == "cp" and (block_parallel_size > 1 or context_parallel_size == 1):
        raise ValueError(
            f"--context-scheme cp is the baseline on --context-parallel-size ranks alone, not with "
            f"--context-parallel-size {context_parallel_size} --bp-size {block_parallel_size}. Leave it out for CSBP, "
            "or use --context-parallel-size above 1 without --bp-size."
        )
    if context_parallel_size == block_parallel_size:
        return Scheme.SINGLE if context_parallel_size == 1 else Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
    if context_parallel_size == 1:
        return Scheme.BLOCK_PARALLEL
    if block_parallel_size == 1 and context_scheme == "cp":
        return Scheme.CONTEXT_PARALLEL
    if block_parallel_size == 1:
        raise ValueError(
            f"--context-parallel-size {context_parallel_size} with --diffusion-block-size and without --bp-size is "
            f"ambiguous. Add --bp-size {context_parallel_size} for CSBP, which sends no corrupted keys and values, or "
            "--context-scheme cp to run the CP baseline on purpose."
        )
    raise ValueError(
        f"--block-parallel-size {block_parallel_size} differs from --context-parallel-size {context_parallel_size}: "
        f"both name the same ranks, so above 1 they must be equal. Use --context-parallel-size {block_parallel_size} "
        f"--block-parallel-size {block_parallel_size} for CSBP, or leave --context-parallel-size at 1 for pure BP."
    )


@dataclass(frozen=True)
class Sharding:
    """Who owns which chunk of positions.

    Attributes:
        group_size: P, ranks in the context group.
        scheme: how the sequence is spread.
        assignment: which chunks a rank owns.
        keeps_blocks_home: whether active blocks stay with the owner of their chunk, however unequal the ranks' work
            becomes. Models with gated delta nets need it: a block starts from the state in its chunk.

    Raises:
        ValueError: the scheme does not fit the number of ranks.
    """

    group_size: int = 1
    scheme: Scheme = Scheme.SINGLE
    assignment: BlockAssignment = BlockAssignment.DUAL_END
    keeps_blocks_home: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1 or (self.group_size == 1) != (self.scheme is Scheme.SINGLE):
            raise ValueError(f"scheme {self.scheme} does not fit a context group of {self.group_size} ranks.")

    @property
    def num_chunks(self) -> int:
        """Chunks that the sequence is cut into: 2P, or 1 on one rank."""
        return 1 if self.group_size == 1 else 2 * self.group_size

    @property
    def clean_is_replicated(self) -> bool:
        """Whether every rank holds the whole clean copy (pure BP)."""
        return self.scheme is Scheme.BLOCK_PARALLEL

    @property
    def shares_clean_keys(self) -> bool:
        """Whether ranks need clean keys of one another."""
        return self.scheme in (Scheme.CONTEXT_PARALLEL, Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL)

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
