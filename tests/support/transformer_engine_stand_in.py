# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's two fused attention functions on a CPU, with the signatures of a recorded version.

Like the originals it reads raw pointers (a strided tensor is misread as if it were contiguous), takes its default
layout where the caller forgot one, writes fresh tensors, and keeps the log-sum-exp as fp32 [b, h, s, 1]. It knows only
what the adapter may ask for and refuses the rest.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_csbp.transformer.kernels.transformer_engine_symbols import Symbols
from tests.support.transformer_engine_signatures import SIGNATURES

ARBITRARY_LENGTH = 1  # the number of the cuDNN sub-backend F16_arbitrary_seqlen


@dataclass
class StandIn:
    """One version of Transformer Engine.

    Attributes:
        version: recorded version whose signatures to have.
        exact: take fp64 too, with a log-sum-exp in fp64, to test exactness; the original takes fp16 and bf16 only.
        selects: what the selector says: (is fused attention allowed, sub-backend).
        questions: what the selector was asked.
        calls: arguments of every call, as the original binds them.
    """

    version: str = "2.20"
    exact: bool = False
    selects: tuple[bool, int | None] = (True, ARBITRARY_LENGTH)
    questions: list[Any] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def symbols(self) -> Symbols:
        forward, backward, params = SIGNATURES[self.version]
        defaults = {"core_attention_bias_requires_grad": True, "core_attention_bias_shape": "1hss"}
        return Symbols(
            fused_attn_fwd=_with_signature("fused_attn_fwd", forward, self._forward),
            fused_attn_bwd=_with_signature("fused_attn_bwd", backward, self._backward),
            backend=ARBITRARY_LENGTH,
            attention_params=make_dataclass(
                "AttentionParams", [(name, Any, field(default=defaults.get(name))) for name in params.split()]
            ),
            get_attention_backend=self._select,
            dtypes={torch.bfloat16: "kBFloat16", torch.float16: "kFloat16", torch.float64: "kFloat64"},
            version=self.version,
        )

    def _select(self, params: Any) -> tuple[Any, ...]:
        self.questions.append(params)
        allowed, backend = self.selects
        dtypes = (torch.float16, torch.bfloat16) + ((torch.float64,) if self.exact else ())
        if params.qkv_dtype not in dtypes:
            allowed, backend = False, None
        # On Hopper with deterministic training the original refuses a bias that needs a gradient, even without a bias.
        if params.deterministic and params.core_attention_bias_requires_grad:
            allowed, backend = False, None
        return False, None, allowed, backend, True, [False, allowed, True]

    def _forward(self, given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        self.calls.append(given)
        problem = self._problem(given)
        assert given["is_training"], "inference returns no log-sum-exp"
        assert isinstance(given["rng_gen"], torch.Generator), "else the device's own generator would move"
        out, lse = problem.attend()
        rng_state = torch.tensor([1234, 0], dtype=torch.int64)
        return problem.written(out, given.get("o_format", problem.layout)), [lse.unsqueeze(-1), rng_state]

    def _backward(self, given: dict[str, Any]) -> tuple[Tensor | None, ...]:
        self.calls.append(given)
        problem = self._problem(given)
        lse, rng_state = given["aux_ctx_tensors"]
        statistics = torch.float64 if self.exact else torch.float32
        assert lse.dtype is statistics, lse.dtype
        assert lse.shape == (problem.batch, given["q"].shape[2], problem.rows, 1), lse.shape
        assert (rng_state.dtype, *rng_state.shape) == (torch.int64, 2), rng_state
        if "dqkv_dtype" in given:
            assert given["dqkv_dtype"] == self.symbols().dtypes[given["q"].dtype], "gradients in the dtype of d_o"
        grad_out = problem.read(given["d_o"], given.get("do_format", problem.layout))
        out = problem.read(given["o"], given.get("o_format", problem.layout))
        grads = problem.differentiate(grad_out, out, _raw(lse).squeeze(-1).double())
        layout = given.get("dqkv_layout", given["qkv_layout"])
        return (*(problem.written(grad, _format_of(layout)) for grad in grads), None)

    def _problem(self, given: dict[str, Any]) -> "_Problem":
        tensors = [given[name] for name in ("q", "k", "v", "o", "d_o") if name in given]
        assert len({tensor.dtype for tensor in tensors} | {given["fake_dtype"]}) == 1, "one dtype"
        layout = _format_of(given["qkv_layout"])
        problem = _Problem(
            *(_as_bshd(_raw(given[name]), layout).double() for name in ("q", "k", "v")),
            layout=layout,
            dtype=given["fake_dtype"],
            causal={"no_mask": False, "padding": False, "causal": True, "padding_causal": True}[
                given["attn_mask_type"]
            ],
            scale=given["attn_scale"],
        )
        for name, length in (("q", problem.rows), ("kv", problem.key.shape[1])):
            lengths = given[f"cu_seqlens_{name}"]
            assert given[f"max_seqlen_{name}"] == length
            assert lengths.dtype is torch.int32
            assert lengths.tolist() == [i * length for i in range(problem.batch + 1)]
        # cuDNN's keys and rows come in groups of 128: a length between them is safe only with a mask that ends it.
        has_tail = bool(problem.rows % 128 or problem.key.shape[1] % 128)
        assert given["attn_mask_type"].startswith("padding") == has_tail
        assert int(given["fused_attention_backend"]) == ARBITRARY_LENGTH
        assert (given["dropout"], given["attn_bias_type"]) == (0.0, "no_bias")
        assert given["window_size"] == ((-1, 0) if problem.causal else (-1, -1))
        return problem


@dataclass
class _Problem:
    """Attention in fp64 on [b, s, h, d]."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    dtype: torch.dtype
    causal: bool
    scale: float

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def rows(self) -> int:
        return self.query.shape[1]

    def attend(self) -> tuple[Tensor, Tensor]:
        scores = self._scores()
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhst,bthd->bshd", (scores - lse.unsqueeze(-1)).exp(), self._expand(self.value))
        return out, lse.to(torch.float64 if self.dtype is torch.float64 else torch.float32)

    def differentiate(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = (self._scores() - lse.unsqueeze(-1)).exp()
        delta = (grad_out * out).sum(-1).transpose(1, 2).unsqueeze(-1)
        grad_weights = torch.einsum("bshd,bthd->bhst", grad_out, self._expand(self.value))
        grad_scores = weights * (grad_weights - delta) * self.scale
        return (
            torch.einsum("bhst,bthd->bshd", grad_scores, self._expand(self.key)),
            self._reduce(torch.einsum("bhst,bshd->bthd", grad_scores, self.query)),
            self._reduce(torch.einsum("bhst,bshd->bthd", weights, grad_out)),
        )

    def read(self, tensor: Tensor, layout: str) -> Tensor:
        return _as_bshd(_raw(tensor), layout).double()

    def written(self, tensor_BSHD: Tensor, layout: str) -> Tensor:
        return _as_bshd(tensor_BSHD, layout).to(self.dtype).contiguous()

    def _scores(self) -> Tensor:
        scores = torch.einsum("bshd,bthd->bhst", self.query, self._expand(self.key)) * self.scale
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return scores

    def _expand(self, tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(self.query.shape[2] // tensor.shape[2], dim=2)

    def _reduce(self, grad: Tensor) -> Tensor:
        return grad.unflatten(2, (self.key.shape[2], -1)).sum(3)


def _with_signature(name: str, parameters: str, implementation: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a function with exactly these parameters, so that Python binds arguments as it does for the original."""
    scope: dict[str, Any] = {"_implementation": implementation}
    exec(f"def {name}({parameters}):\n    return _implementation(dict(locals()))", scope)
    function: Callable[..., Any] = scope[name]
    assert list(inspect.signature(function).parameters) == [part.split("=")[0] for part in _split(parameters)]
    return function


def _split(parameters: str) -> list[str]:
    return parameters.replace("(-1, -1)", "()").split(", ")


def _raw(tensor: Tensor) -> Tensor:
    """Return what the original sees: memory from the first element on, in the given shape, without strides."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def _format_of(layout: str) -> str:
    formats = {"bshd_bshd_bshd": "bshd", "sbhd_sbhd_sbhd": "sbhd"}
    assert layout in formats, f"{layout} is not a layout of separate tensors"
    return formats[layout]


def _as_bshd(tensor: Tensor, layout: str) -> Tensor:
    """Swap the first two dims of an sbhd tensor; its own inverse."""
    return {"bshd": tensor, "sbhd": tensor.transpose(0, 1)}[layout]
