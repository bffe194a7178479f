# SPDX-License-Identifier: Apache-2.0
"""A test of the chosen kernel on the machine that it will train on: tiny, before the first step, on every rank.

Kernels come with drivers, cuDNN and Transformer Engine in many combinations, and some were wrong: a log-sum-exp in
another base or of another shape, rows of a partial tile, a backward that ignores the log-sum-exp that it is given.

Shapes: G independent problems of one tile, T rows, U keys, N query heads, K key/value heads, D head dim; S local rows.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, dense_mask
from megatron_csbp.transformer.kernels.interface import AttentionKernel
from megatron_csbp.transformer.kernels.local_interface import LocalKernel
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.selection import select_kernel
from megatron_csbp.transformer.softmax_merge import merge_partial

# Largest error, relative to the largest entry. A wrong kernel is off by the order of 1.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-9}

# Causal, G, T, U. Prefix tiles, which are most of the work, have lengths like those of the second half.
_CASES = (
    (True, 1, 96, 96),
    (False, 2, 48, 80),
    (False, 5, 4, 4),
    (True, 1, 128, 128),
    (False, 1, 128, 384),
    (False, 2, 128, 128),
)
_NAMES = ("output", "log-sum-exp", "gradient of the query", "gradient of the key", "gradient of the value")
_ALTERNATIVE = {"transformer_engine": "torch", "flex": "torch", "hybrid": "torch", "torch": "transformer_engine"}


@dataclass(frozen=True)
class HeadShape:
    """Attention heads on one rank.

    Attributes:
        num_query_heads: N.
        num_key_value_heads: K.
        head_dim: D.
    """

    num_query_heads: int
    num_key_value_heads: int
    head_dim: int


@cache
def checked_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: HeadShape,
    megatron_attention_backend: str = "auto",
    static_chunk_rows: int | None = None,
) -> AttentionKernel:
    """Return the kernel that `select_kernel` chooses, after its self-test; each combination is tested once.

    Args:
        name: value of `--csbp-attention-backend`.
        device: where the tensors live.
        dtype: their dtype.
        heads: heads on this rank.
        megatron_attention_backend: value of Megatron's `--attention-backend`.
        static_chunk_rows: C, if all samples have one geometry.

    Raises:
        ValueError: see `select_kernel` and `check_kernel`.
    """
    kernel = select_kernel(name, device, megatron_attention_backend, static_chunk_rows)
    check_kernel(kernel, device, dtype, heads)
    return kernel


def check_kernel(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, heads: HeadShape) -> None:
    """Compare a kernel with the reference on tiny cases, forward and backward.

    The cases: causal squares; rectangles whose keys come in two parts, merged, with the backward of each part from
    merged results; many small squares; each with lengths that are multiples of 128, for which backends choose another
    operator or mask, and with others; rows whose scores are all very negative; for a `LocalKernel` the local tiles of
    a small plan.

    Args:
        kernel: what to test.
        device: where.
        dtype: in which dtype.
        heads: heads on this rank.

    Raises:
        ValueError: the kernel is wrong, or fails; names the backend, the error, the tolerance and what to use instead.
    """
    try:
        with torch.no_grad(), _on(device):
            _leave_nan_in_free_memory(device)
            for causal, problems, rows, keys in _CASES:
                inputs = _inputs(problems, rows, keys, dtype, device, heads)
                got = _run_in_two_parts(kernel, inputs) if keys > rows else _run(kernel, inputs, causal)
                exact = _run(ReferenceKernel(), [tensor.double() for tensor in inputs], causal)
                _compare(kernel, device, dtype, got, exact)
            for rows in (64, 128, 192):
                _check_negative_scores(kernel, device, dtype, heads, rows)
            if isinstance(kernel, LocalKernel):
                _check_local(kernel, device, dtype, heads)
    except ValueError:
        raise
    except Exception as error:  # compilers and extensions raise all kinds
        raise ValueError(f"{_blame(kernel, device)} fails in its self-test ({error}). {_advice(kernel)}") from error


def _leave_nan_in_free_memory(device: torch.device) -> None:
    """Fill what the next tensors will get, so that a kernel that reads or leaves rows beyond a tile is found out."""
    kept = [torch.full((size,), torch.nan, device=device) for size in (2**10, 2**14, 2**18, 2**20) for _ in range(4)]
    del kept


def _check_negative_scores(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, heads: HeadShape, rows: int
) -> None:
    """Let every score of a square be about -100: exp(0 - log-sum-exp) of a key that is not there would overflow.

    Rounding weighs heavily where scores are that large, so all that is asked is that the results are finite.
    """
    grad_out, query, key, value = _inputs(1, rows, rows, dtype, device, heads)
    query, key = 0.1 * query, 0.1 * key
    query[..., 0], key[..., 0] = 1.0, -100.0 * heads.head_dim**0.5
    for name, tensor in zip(_NAMES, _run(kernel, [grad_out, query, key, value], False), strict=True):
        if not tensor.isfinite().all():
            raise ValueError(
                f"{_blame(kernel, device)} is wrong on this machine: its {name} is not finite where all scores of a "
                f"row are very negative ({rows} rows and keys). {_advice(kernel)}"
            )


def _run(kernel: AttentionKernel, inputs: list[Tensor], causal: bool) -> list[Tensor]:
    """Return output, log-sum-exp and the three gradients."""
    grad_out, query, key, value = inputs
    scale = query.shape[-1] ** -0.5
    out, lse = kernel.forward(query, key, value, causal=causal, scale=scale)
    return [out, lse, *kernel.backward(grad_out, query, key, value, out, lse, causal=causal, scale=scale)]


def _run_in_two_parts(kernel: AttentionKernel, inputs: list[Tensor]) -> list[Tensor]:
    """Return the same for keys in two tiles, merged as a rank merges them."""
    grad_out, query, key, value = inputs
    scale, rows = query.shape[-1] ** -0.5, query.shape[1]
    parts = [(key[:, part], value[:, part]) for part in (slice(0, rows), slice(rows, None))]
    (out, lse), second = (kernel.forward(query, *part, causal=False, scale=scale) for part in parts)
    out, lse = out.to(lse.dtype).clone(), lse.clone()
    merge_partial(out, lse, *second)
    merged = out.to(query.dtype)
    first, last = (kernel.backward(grad_out, query, *part, merged, lse, causal=False, scale=scale) for part in parts)
    return [merged, lse, first[0] + last[0], torch.cat([first[1], last[1]], 1), torch.cat([first[2], last[2]], 1)]


def _check_local(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, heads: HeadShape) -> None:
    """Compare the local tiles of one rank that holds a whole small sequence; its rows are no multiple of 128."""
    assert isinstance(kernel, LocalKernel)
    plan = plan_attention(RankRows(Sample(160, 16), Sharding()), Mask(CleanAttention.TOKEN_CAUSAL))
    rows = plan.rows.num_rows
    inputs = _inputs(1, rows, rows, dtype, device, heads)
    grad_out, query, key, value = (tensor.transpose(0, 1) for tensor in inputs)
    scale = heads.head_dim**-0.5
    out, lse = kernel.forward_local(query, key, value, plan=plan, scale=scale)
    grads = kernel.backward_local(grad_out, query, key, value, out, lse, plan=plan, scale=scale)
    got = [tensor.transpose(0, 1) for tensor in (out, lse, *grads)]
    exact = _dense_local([tensor.double() for tensor in inputs], plan, scale)
    _compare(kernel, device, dtype, got, exact)


def _dense_local(inputs: list[Tensor], plan: AttentionPlan, scale: float) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of the local tiles, from a dense mask."""
    grad_out, query, key, value = inputs
    rows = (plan.rows.sample_positions, plan.rows.copies)
    allowed_SS = torch.from_numpy(dense_mask(plan.rows.sample, plan.mask, rows, rows)).to(query.device)
    with torch.enable_grad():
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        repeats = query.shape[2] // key.shape[2]
        scores = torch.einsum("gtnd,gund->gntu", query, key.repeat_interleave(repeats, 2)) * scale
        scores = scores.masked_fill(~allowed_SS, -torch.inf)
        out = torch.einsum("gntu,gund->gtnd", scores.softmax(-1), value.repeat_interleave(repeats, 2))
        grads = torch.autograd.grad(out, (query, key, value), grad_out)
    return [out.detach(), scores.detach().logsumexp(-1).transpose(1, 2), *grads]


def _inputs(
    problems: int, rows: int, keys: int, dtype: torch.dtype, device: torch.device, heads: HeadShape
) -> list[Tensor]:
    """Return gradient of the output, query, key and value, as views of fused projections like those of a layer.

    The numbers come from a generator of their own on the CPU: the run's random state stays as it is.
    """
    generator = torch.Generator().manual_seed(0)
    num_query, num_key = heads.num_query_heads, heads.num_key_value_heads

    def projection(length: int, num_heads: int) -> Tensor:
        shape = (length, problems, num_heads, heads.head_dim)
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype).transpose(0, 1)

    grad_out, query = projection(rows, 2 * num_query).chunk(2, dim=2)
    key, value = projection(keys, 2 * num_key).chunk(2, dim=2)
    return [grad_out, query, key, value]


def _compare(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, got: list[Tensor], exact: list[Tensor]
) -> None:
    for name, ours, theirs in zip(_NAMES, got, exact, strict=True):
        error = ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()
        if not error <= TOLERANCE[dtype]:  # NaN is wrong too
            raise ValueError(
                f"{_blame(kernel, device)} is wrong on this machine: its {name} is off by {error:.2g} of the largest "
                f"entry, where {TOLERANCE[dtype]:.2g} is allowed for {dtype}. {_advice(kernel)}"
            )


def _blame(kernel: AttentionKernel, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"--csbp-attention-backend {kernel.name} ({where}, torch {torch.__version__})"


def _advice(kernel: AttentionKernel) -> str:
    return (
        f"Use --csbp-attention-backend {_ALTERNATIVE.get(kernel.name, 'torch')}, and please report it with the output "
        "of python -m megatron_csbp.tools.gpu_check."
    )


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make `device` current (kernels launch there) and give the random state back as it was."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.random.fork_rng([device]):
        yield
