# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's fused attention functions in whatever version is installed, 2.9 to 2.20.

These functions are the ones that Transformer Engine's own context parallelism calls. They are not public API:
parameters came and went at 2.10, 2.12 and 2.15. Their signatures are inspected once, and all arguments are passed by
name. Nothing else in this package touches them.

Shapes: G independent problems of one tile (Transformer Engine's batch), T rows, U keys, N query heads, K key/value
heads, D head dim. Tensors are contiguous in `tensor_format`: "bshd" is [G, T, N, D], "sbhd" is [T, G, N, D].
"""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_csbp.transformer.kernels.cudnn_tails import ends_within_a_group
from megatron_csbp.transformer.kernels.transformer_engine_symbols import Symbols

# Arguments, and fields of the selector's question, that only some versions have; all others must be there.
_OPTIONAL = frozenset({"o_format", "do_format", "dqkv_layout", "dqkv_dtype", "bottom_right_diagonal", "softmax_scale"})


def deterministic_required() -> bool:
    """Return whether only deterministic algorithms may run, by the rule of Transformer Engine's own modules."""
    allowed = bool(int(os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")))
    return torch.are_deterministic_algorithms_enabled() or not allowed


class FusedAttention:
    """Forward and backward of dense or causal attention with one calling convention for all versions.

    Args:
        symbols: what `import_symbols` returns.

    Raises:
        ValueError: the signatures are not those of a known version; names the parameter.
    """

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._forward_parameters = inspect.signature(symbols.fused_attn_fwd).parameters
        self._backward_parameters = inspect.signature(symbols.fused_attn_bwd).parameters
        self._params_fields = frozenset(field.name for field in fields(symbols.attention_params))
        self._supported: set[tuple[object, ...]] = set()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, tensor_format: str, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            query: queries in `tensor_format`, fp16 or bf16.
            key: keys, likewise.
            value: values, likewise.
            tensor_format: "bshd" or "sbhd".
            causal: whether row i sees keys up to i only (T = U then).
            scale: factor on the scores.

        Returns:
            The output in `tensor_format` and dtype of `query`, and the natural log-sum-exp [G, N, T, 1] in fp32.

        Raises:
            ValueError: Transformer Engine's selector finds no fused attention for this.
        """
        common = self._common_arguments(query, key, value, tensor_format, causal, scale)
        # A generator of its own: by default every call moves the device's, by a number of tiles that ranks differ in.
        arguments = {**common, "is_training": True, "rng_gen": _generator(query.device)}
        results = self._call(self._symbols.fused_attn_fwd, self._forward_parameters, arguments)
        out, aux_ctx_tensors = results[0], results[1]
        lse_GNT1 = aux_ctx_tensors[0]
        problems, rows = _problems_and_rows(query, tensor_format)
        if tuple(lse_GNT1.shape) != (problems, query.shape[2], rows, 1):
            raise RuntimeError(
                f"Transformer Engine {self._symbols.version} returned softmax statistics of shape "
                f"{tuple(lse_GNT1.shape)}, not a log-sum-exp."
            )
        return out, lse_GNT1

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse_GNT1: Tensor,
        *,
        tensor_format: str,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in `tensor_format` and the dtype of the inputs.

        Args:
            grad_out: gradient of the output, in `tensor_format` and the dtype of `query`.
            query: as for `forward`.
            key: as for `forward`.
            value: as for `forward`.
            out: output, merged over all keys, in the dtype of `query`.
            lse_GNT1: its log-sum-exp, contiguous fp32 [G, N, T, 1].
            tensor_format: "bshd" or "sbhd".
            causal: as for `forward`.
            scale: as for `forward`.
        """
        arguments = {
            **self._common_arguments(query, key, value, tensor_format, causal, scale),
            "o": out,
            "d_o": grad_out,
            "aux_ctx_tensors": [lse_GNT1, _rng_state(query.device)],
            "deterministic": deterministic_required(),
            "do_format": tensor_format,
            "dqkv_layout": _layout(tensor_format),
        }
        if "dqkv_dtype" in self._backward_parameters:
            arguments["dqkv_dtype"] = self._symbols.dtypes[query.dtype]
        grads = self._call(self._symbols.fused_attn_bwd, self._backward_parameters, arguments)
        return grads[0], grads[1], grads[2]

    def _common_arguments(
        self, query: Tensor, key: Tensor, value: Tensor, tensor_format: str, causal: bool, scale: float
    ) -> dict[str, Any]:
        """Return the arguments that both functions take, after asking the selector."""
        # Transformer Engine reads raw pointers: a strided tensor would be misread without an error.
        assert all(tensor.is_contiguous() for tensor in (query, key, value))
        self._check_supported(query, key, tensor_format, causal, scale)
        problems, rows = _problems_and_rows(query, tensor_format)
        _, keys = _problems_and_rows(key, tensor_format)
        return {
            "max_seqlen_q": rows,
            "max_seqlen_kv": keys,
            "cu_seqlens_q": _cumulative_lengths(problems, rows, query.device),
            "cu_seqlens_kv": _cumulative_lengths(problems, keys, query.device),
            "q": query,
            "k": key,
            "v": value,
            "fake_dtype": query.dtype,
            "fused_attention_backend": self._symbols.backend,
            "attn_scale": scale,
            "dropout": 0.0,
            "qkv_layout": _layout(tensor_format),
            "o_format": tensor_format,
            "attn_mask_type": _mask_type(causal, rows, keys),
            "attn_bias_type": "no_bias",
            "window_size": _window(causal),
        }

    def _check_supported(self, query: Tensor, key: Tensor, tensor_format: str, causal: bool, scale: float) -> None:
        """Ask Transformer Engine's selector, once for each kind of call."""
        problems, rows = _problems_and_rows(query, tensor_format)
        _, keys = _problems_and_rows(key, tensor_format)
        description: dict[str, Any] = {
            "qkv_dtype": query.dtype,
            "qkv_layout": _layout(tensor_format),
            "batch_size": problems,
            "num_heads": query.shape[2],
            "num_gqa_groups": key.shape[2],
            "max_seqlen_q": rows,
            "max_seqlen_kv": keys,
            "head_dim_qk": query.shape[3],
            "head_dim_v": query.shape[3],
            "attn_mask_type": _mask_type(causal, rows, keys),
            "window_size": _window(causal),
            # What the two functions take for granted with these mask types.
            "bottom_right_diagonal": False,
            "softmax_scale": scale,
            "core_attention_bias_type": "no_bias",
            "core_attention_bias_shape": None,
            # The default, True, makes the selector refuse deterministic training.
            "core_attention_bias_requires_grad": False,
            "attention_dropout": 0.0,
            "deterministic": deterministic_required(),
            "is_training": True,
        }
        question = tuple(description.values())
        if question in self._supported:
            return
        unknown = description.keys() - self._params_fields - _OPTIONAL
        if unknown:
            raise self._unknown_version("AttentionParams", unknown)
        params = {name: value for name, value in description.items() if name in self._params_fields}
        _, _, _, backend, _, available = self._symbols.get_attention_backend(self._symbols.attention_params(**params))
        # The selector may prefer another implementation; what counts here is that this one is among those it allows.
        if not available[1] or backend is None or int(backend) != int(self._symbols.backend):
            raise ValueError(self._refusal(description, available))
        self._supported.add(question)

    def _refusal(self, description: Mapping[str, Any], available: Any) -> str:
        what = (
            f"{description['qkv_dtype']}, {description['num_heads']} query and {description['num_gqa_groups']} "
            f"key/value heads of {description['head_dim_qk']}, {description['max_seqlen_q']} x "
            f"{description['max_seqlen_kv']} rows, {description['attn_mask_type']}"
            f"{', deterministic' if description['deterministic'] else ''}"
        )
        return (
            f"--csbp-attention-backend transformer_engine: Transformer Engine {self._symbols.version} has no fused "
            f"attention with a log-sum-exp for {what} (it offers {available}). It takes fp16 and bf16, and is off "
            "with --attention-backend flash, unfused or local, NVTE_FUSED_ATTN=0 or NVTE_FUSED_ATTN_BACKEND=0. Use "
            "--bf16 and --attention-backend auto or fused, or --csbp-attention-backend torch."
        )

    def _call(
        self, function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
    ) -> Any:
        """Call with those arguments that this version has; refuse a version that needs others, or lacks some."""
        needed = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
        unknown = (needed - arguments.keys()) | (arguments.keys() - parameters.keys() - _OPTIONAL)
        if unknown:
            raise self._unknown_version(function.__name__, unknown)
        return function(**{name: value for name, value in arguments.items() if name in parameters})

    def _unknown_version(self, name: str, parameters: set[str]) -> ValueError:
        return ValueError(
            f"--csbp-attention-backend transformer_engine: {name} of Transformer Engine {self._symbols.version} has "
            f"changed ({', '.join(sorted(parameters))}); tested are 2.9 to 2.20. Use --csbp-attention-backend torch."
        )


def _layout(tensor_format: str) -> str:
    return "_".join([tensor_format] * 3)


def _mask_type(causal: bool, rows: int, keys: int) -> str:
    """Return the mask; a padding mask, by the cumulative lengths, where cuDNN has to be told that a length ends."""
    if ends_within_a_group(rows, keys):
        return "padding_causal" if causal else "padding"
    return "causal" if causal else "no_mask"


def _window(causal: bool) -> tuple[int, int]:
    return (-1, 0) if causal else (-1, -1)


def _problems_and_rows(tensor: Tensor, tensor_format: str) -> tuple[int, int]:
    problems, rows = tensor.shape[:2] if tensor_format == "bshd" else (tensor.shape[1], tensor.shape[0])
    return problems, rows


@cache
def _cumulative_lengths(problems: int, rows: int, device: torch.device) -> Tensor:
    """Return where each of equally long problems starts and ends, int32 [G + 1]."""
    return torch.arange(0, (problems + 1) * rows, rows, dtype=torch.int32, device=device)


@cache
def _generator(device: torch.device) -> torch.Generator:
    """Return a random generator for dropout, of which there is none."""
    return torch.Generator(device)


@cache
def _rng_state(device: torch.device) -> Tensor:
    """Return the state that dropout would have used; without dropout nothing reads it."""
    return torch.zeros(2, dtype=torch.int64, device=device)
