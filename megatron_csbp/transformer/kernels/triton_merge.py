# SPDX-License-Identifier: Apache-2.0
"""The merge of partial attention results as one Triton kernel, in place of seven elementwise ones of PyTorch.

`softmax_merge` says what is computed, calls this on CUDA, and is its oracle.

Shapes: leading dims are free but equal; N query heads, D head dim. A row is one vector of D and its log-sum-exp.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_MOST_DIMS = 5
"""Of a row's index: two repeats of a tile, micro-batch, rows, heads."""
_ROWS = 16
"""Rows of one program: with a head dim of 128, 8 KiB of fp32."""
_FEWEST_BYTES = 16
"""What one thread loads at once, where strides and addresses allow it."""
_STRIDES = [f"{tensor}{dim}" for tensor in ("a", "b", "c", "d", "e") for dim in range(_MOST_DIMS)]
_SIZES = [f"size{dim}" for dim in range(1, _MOST_DIMS)]


# Sizes and strides are no part of what is compiled: one kernel for all tiles of a run.
@triton.jit(do_not_specialize=["num_rows", *_SIZES, *_STRIDES])
def merge_kernel(
    out, lse, partial_out, partial_lse, final, num_rows, size1, size2, size3, size4,
    a0, a1, a2, a3, a4, b0, b1, b2, b3, b4, c0, c1, c2, c3, c4, d0, d1, d2, d3, d4, e0, e1, e2, e3, e4,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, FINAL: tl.constexpr,
) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    """Merge `ROWS` rows; a to e are the strides of `out`, `lse`, `partial_out`, `partial_lse` and `final`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = row < num_rows
    inside = here[:, None] & (column < HEAD_DIM)[None, :]
    i4 = row % size4
    rest = row // size4
    i3 = rest % size3
    rest = rest // size3
    i2 = rest % size2
    rest = rest // size2
    i1 = rest % size1
    i0 = rest // size1
    at_out = tl.multiple_of(i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3 + i4 * a4, ALIGNED)
    at_lse = i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3 + i4 * b4
    at_partial = tl.multiple_of(i0 * c0 + i1 * c1 + i2 * c2 + i3 * c3 + i4 * c4, ALIGNED)
    at_partial_lse = i0 * d0 + i1 * d1 + i2 * d2 + i3 * d3 + i4 * d4

    total = tl.load(lse + at_lse, mask=here, other=0.0)
    share = tl.load(partial_lse + at_partial_lse, mask=here, other=0.0).to(total.dtype)
    lacks_keys = share == float("-inf")
    difference = share - total
    small = tl.exp(-tl.abs(difference))
    weight = tl.where(difference >= 0, 1.0 / (1.0 + small), small / (1.0 + small))
    weight = tl.where(lacks_keys, 0.0, weight)
    larger = tl.where(difference >= 0, share, total)
    merged_lse = tl.where(total == float("-inf"), share, larger + tl.log(1.0 + small))
    merged_lse = tl.where(lacks_keys, total, merged_lse)  # both may be -inf: their difference is NaN

    before = tl.load(out + at_out[:, None] + column[None, :], mask=inside, other=0.0)
    partial = tl.load(partial_out + at_partial[:, None] + column[None, :], mask=inside, other=0.0).to(before.dtype)
    w = weight[:, None]
    # From the nearer end, as torch.lerp does it: exact at both.
    merged = tl.where(w < 0.5, before + w * (partial - before), partial - (1.0 - w) * (partial - before))
    tl.store(lse + at_lse, merged_lse, mask=here)
    if FINAL:
        at_final = tl.multiple_of(i0 * e0 + i1 * e1 + i2 * e2 + i3 * e3 + i4 * e4, ALIGNED)
        tl.store(final + at_final[:, None] + column[None, :], merged.to(final.dtype.element_ty), mask=inside)
    else:
        tl.store(out + at_out[:, None] + column[None, :], merged, mask=inside)


def merge_fused(
    out_ND: Tensor, lse_N: Tensor, partial_out_ND: Tensor, partial_lse_N: Tensor, final_ND: Tensor | None = None
) -> None:
    """Compute what `softmax_merge.merge_partial` says, in one launch.

    Args:
        out_ND: see there; its last dim is contiguous, like that of `partial_out_ND` and `final_ND`.
        lse_N: see there.
        partial_out_ND: see there.
        partial_lse_N: see there.
        final_ND: see there.
    """
    head_dim = out_ND.shape[-1]
    vectors = [out_ND, partial_out_ND, *([] if final_ND is None else [final_ND])]
    assert all(tensor.stride(-1) == 1 for tensor in vectors), "a row is read and written as one piece"
    num_rows = lse_N.numel()
    if num_rows == 0:
        return
    last = out_ND if final_ND is None else final_ND
    row_strides = [
        out_ND.stride()[:-1], lse_N.stride(), partial_out_ND.stride()[:-1], partial_lse_N.stride(), last.stride()[:-1]
    ]  # fmt: skip
    sizes, strides = _fewest_dims(lse_N.shape, row_strides)
    aligned = _aligned_elements(vectors)
    merge_kernel[(triton.cdiv(num_rows, _ROWS),)](
        out_ND, lse_N, partial_out_ND, partial_lse_N, last, num_rows, *sizes[1:],
        *(stride for of_tensor in strides for stride in of_tensor),
        HEAD_DIM=head_dim, ROWS=_ROWS, COLUMNS=triton.next_power_of_2(head_dim), ALIGNED=aligned,
        FINAL=final_ND is not None,
    )  # fmt: skip


def _fewest_dims(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Join neighbouring dims that one stride spans in every tensor; return exactly five, outer ones of size 1."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, tuple(steps))
        else:
            dims.append((size, tuple(steps)))
    assert len(dims) <= _MOST_DIMS, f"a row's index has {len(dims)} dims"
    dims = [(1, (0,) * len(strides))] * (_MOST_DIMS - len(dims)) + dims
    return [size for size, _ in dims], [[steps[tensor] for _, steps in dims] for tensor in range(len(strides))]


def _aligned_elements(vectors: Sequence[Tensor]) -> int:
    """Return the largest power of two, up to what a thread loads at once, that divides every row's offset."""
    elements = max(1, _FEWEST_BYTES // min(tensor.element_size() for tensor in vectors))
    steps = [stride for tensor in vectors for stride in tensor.stride()[:-1]]
    addresses = [tensor.data_ptr() // tensor.element_size() for tensor in vectors]
    while elements > 1 and any(number % elements for number in (*steps, *addresses)):
        elements //= 2
    return elements
