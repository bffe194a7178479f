# SPDX-License-Identifier: Apache-2.0
"""All ranks of a context group, one after the other in one process, and the same attention from a dense mask.

Shapes: W = 2L whole rows, the corrupted copy first and then the clean copy, both by position; S rows of one rank;
R rows of a gather buffer; C chunk length; B micro-batch, N query heads, K key/value heads, D head dim.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from megatron_csbp.tools.gpu_check.settings import Settings
from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import PendingWork, Transfers
from megatron_csbp.transformer.geometry.key_map import gather_slot
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CopyKind, Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import Transfer
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, all_rows, dense_mask
from megatron_csbp.transformer.kernels import AttentionKernel
from megatron_csbp.transformer.streams import Waitable, side_stream


@dataclass(frozen=True)
class Problem:
    """Queries [W, B, N, D], keys and values [W, B, K, D], and the gradient of the output [W, B, N, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the same in another dtype."""
        return Problem(*(getattr(self, field.name).to(dtype) for field in fields(self)))


@dataclass(frozen=True)
class Result:
    """Output [W, B, N, D] and gradients of query, key and value."""

    out: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor

    def max_errors(self, exact: "Result") -> dict[str, float]:
        """Return the largest absolute error of each part: the output and each gradient, of each copy."""
        errors = {}
        for field in fields(self):
            halves = zip(getattr(self, field.name).chunk(2), getattr(exact, field.name).chunk(2), strict=True)
            for copy, (ours, theirs) in zip(("corrupted", "clean"), halves, strict=True):
                errors[f"{copy} {field.name}"] = (ours.double() - theirs.double()).abs().max().item()
        return errors


def random_problem(settings: Settings) -> Problem:
    """Return a problem in bf16 with normal entries, the same on every machine."""
    heads, generator = settings.accuracy_heads, torch.Generator().manual_seed(0)
    counts = (heads.num_query_heads, *2 * (heads.num_key_value_heads,), heads.num_query_heads)
    shapes = [(2 * settings.accuracy_length, 1, count, heads.head_dim) for count in counts]
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
    return Problem(*(tensor.to(settings.device, torch.bfloat16) for tensor in tensors))


def group_attention(
    problem: Problem,
    scheme: Scheme,
    group_size: int,
    block_size: int,
    clean: CleanAttention,
    kernel: AttentionKernel,
    num_head_groups: int = 1,
) -> Result:
    """Run forward and backward of every rank in turn, and put the results together as training does.

    Args:
        problem: the whole sequence.
        scheme: how it is spread.
        group_size: P.
        block_size: M.
        clean: mask of the clean copy.
        kernel: computes the tiles.
        num_head_groups: groups of heads that are exchanged and computed one after the other.
    """
    total = Result(*(torch.zeros_like(t, dtype=torch.float32) for t in (problem.query, *_inputs(problem))))
    sample, mask = Sample(problem.query.shape[0] // 2, block_size), Mask(clean)
    exchange: _OneProcess | None = None
    for rank in range(group_size):
        plan = layer_plans(sample, Sharding(group_size, scheme), rank).plan(mask)
        rows = plan.rows
        exchange = exchange or _OneProcess(problem, total, rows)
        rows_S = torch.from_numpy(rows.sample_positions + np.where(rows.is_corrupted, 0, sample.length))
        rows_S = rows_S.to(problem.query.device)
        counted_S = torch.from_numpy(rows.is_counted).to(problem.query.device)
        inputs = [tensor[rows_S].requires_grad_() for tensor in _inputs(problem)]
        scale = problem.query.shape[-1] ** -0.5
        context = AttentionContext(plan, kernel, scale, exchange if plan.exchanges else None, num_head_groups)
        out_SBND = block_diffusion_attention(inputs[0], inputs[1], inputs[2], context)
        grad_out_SBND = problem.grad_out[rows_S] * counted_S[:, None, None, None]
        grads = torch.autograd.grad(out_SBND, inputs, grad_out_SBND)
        total.out[rows_S[counted_S]] = out_SBND.detach()[counted_S].float()
        for whole, share in zip((total.grad_query, total.grad_key, total.grad_value), grads, strict=True):
            whole.index_add_(0, rows_S, share.float())
    return total


def _inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return problem.query, problem.key, problem.value


class _OneProcess:
    """Stands for the network: gathers from the whole sequence, and sums scattered gradients into the result.

    Both run where collectives do, on the side stream, so that a missing wait shows.
    """

    def __init__(self, problem: Problem, total: Result, rows: RankRows) -> None:
        """Take inputs and results, and any rank's rows: buffers are the same on all."""
        self._sources = (problem.key, problem.value)
        self._sums = (total.grad_key, total.grad_value)
        self._rows = rows
        self._heads_done: Counter[tuple[str, CopyKind]] = Counter()

    def start_gathers(
        self, tensors_SBKD: Sequence[Tensor], transfers: Transfers
    ) -> Sequence[PendingWork[list[Tensor]]]:
        """See `KeyValueExchange.start_gathers`."""
        return [self._gather(tensors_SBKD, *transfer) for transfer in transfers]

    def start_reduces(
        self,
        buffers_RBKD: Sequence[Sequence[Tensor]],
        totals_SBKD: Sequence[Tensor],
        transfers: Transfers,
        payload_dtype: torch.dtype,
    ) -> Sequence[PendingWork[None]]:
        """See `KeyValueExchange.start_reduces`; the shares stay in the sum, so a rank gets back nothing."""
        return [
            self._reduce([buffer_RBKD.to(payload_dtype) for buffer_RBKD in buffers], *transfer)
            for buffers, transfer in zip(buffers_RBKD, transfers, strict=True)
        ]

    def _gather(
        self, tensors_SBKD: Sequence[Tensor], copies: CopyKind, transfer: Transfer
    ) -> PendingWork[list[Tensor]]:
        rows_R = self._rows_of_buffer(copies, transfer).to(tensors_SBKD[0].device)
        buffers_RBKD = [tensor.new_empty(len(rows_R), *tensor.shape[1:]) for tensor in tensors_SBKD]
        heads = self._next_heads("gather", copies, tensors_SBKD[0].shape[2])

        def start(async_op: bool) -> Sequence[Waitable]:
            for whole_WBKD, buffer_RBKD in zip(self._sources, buffers_RBKD, strict=True):
                torch.index_select(whole_WBKD[:, :, heads], 0, rows_R, out=buffer_RBKD)
            return ()

        works = side_stream(rows_R.device).launch(start, [rows_R, *buffers_RBKD])
        return PendingWork(works, lambda: buffers_RBKD)

    def _reduce(self, payloads_RBKD: Sequence[Tensor], copies: CopyKind, transfer: Transfer) -> PendingWork[None]:
        rows_R = self._rows_of_buffer(copies, transfer).to(payloads_RBKD[0].device)
        heads = self._next_heads("reduce", copies, payloads_RBKD[0].shape[2])

        def start(async_op: bool) -> Sequence[Waitable]:
            for sum_WBKD, payload_RBKD in zip(self._sums, payloads_RBKD, strict=True):
                sum_WBKD[:, :, heads].index_add_(0, rows_R, payload_RBKD.float())
            return ()

        works = side_stream(rows_R.device).launch(start, [rows_R, *payloads_RBKD])
        return PendingWork(works, lambda: None)

    def _next_heads(self, step: str, copies: CopyKind, count: int) -> slice:
        """Return the heads of the next exchange of a kind; a layer takes its groups in the order of their heads."""
        first = self._heads_done[step, copies] % self._sources[0].shape[2]
        self._heads_done[step, copies] += count
        return slice(first, first + count)

    def _rows_of_buffer(self, copies: CopyKind, transfer: Transfer) -> Tensor:
        """Return the whole row that each row of a gather buffer holds, int64 [R]."""
        rows = self._rows
        length, num_chunks = rows.chunk_length, rows.sharding.num_chunks
        assert transfer.lowering is Lowering.ALL_GATHER
        assert transfer.num_rows == rows.sample.length
        offset = rows.sample.length if copies is CopyKind.CLEAN else 0
        starts = torch.empty(num_chunks, dtype=torch.int64)
        for chunk in range(num_chunks):
            starts[gather_slot(rows, chunk)] = offset + chunk * length
        return (starts[:, None] + torch.arange(length)).flatten()


def dense_attention(problem: Problem, block_size: int, clean: CleanAttention) -> Result:
    """Attend with the full mask in the dtype of the problem, one key/value head after the other.

    Args:
        problem: the whole sequence.
        block_size: M.
        clean: mask of the clean copy.
    """
    allowed_WW = allowed_mask(problem.query.shape[0] // 2, block_size, clean).to(problem.query.device)
    repeats = problem.query.shape[2] // problem.key.shape[2]
    results = []
    for head in range(problem.key.shape[2]):
        queries = slice(head * repeats, (head + 1) * repeats)
        own = slice(head, head + 1)
        views = (problem.query[:, :, queries], problem.key[:, :, own], problem.value[:, :, own])
        inputs = [view.detach().requires_grad_() for view in views]
        scores_BNWW = torch.einsum("sbnd,ubkd->bnsu", inputs[0], inputs[1]) * problem.query.shape[-1] ** -0.5
        weights_BNWW = scores_BNWW.masked_fill(~allowed_WW, -torch.inf).softmax(-1)
        out = torch.einsum("bnsu,ubkd->sbnd", weights_BNWW, inputs[2])
        results.append([out.detach(), *torch.autograd.grad(out, inputs, problem.grad_out[:, :, queries])])
    return Result(*(torch.cat(parts, dim=2) for parts in zip(*results, strict=True)))


def allowed_mask(sequence_length: int, block_size: int, clean: CleanAttention) -> Tensor:
    """Return who sees whom, bool [W, W], from the one definition of the mask."""
    sample = Sample(sequence_length, block_size)
    return torch.from_numpy(dense_mask(sample, Mask(clean), all_rows(sample), all_rows(sample)))
