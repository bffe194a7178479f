# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's fused attention functions in whatever version is installed, 2.9 to 2.20.

These functions are the ones that Transformer Engine's own context parallelism calls. They are not public API:
parameters came and went at 2.10, 2.12 and 2.15. Their signatures are inspected once, and all arguments are passed by
name. Nothing else in this package touches them.

Shapes: G independent problems of one tile (Transformer Engine's batch), T rows, U keys, N query heads, K key/value
heads, D head dim. Tensors are contiguous in `tensor_format`: "bshd" is [G, T, N, D], "sbhd" is [T, G, N, D].
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_csbp.transformer.kernels.transformer_engine_call import Call, describe
from megatron_csbp.transformer.kernels.transformer_engine_symbols import Symbols

# Arguments, and fields of the selector's question, that only some versions have; all others must be there.
_OPTIONAL = frozenset({"o_format", "do_format", "dqkv_layout", "dqkv_dtype", "bottom_right_diagonal", "softmax_scale"})

_FORWARD_TENSORS = frozenset({"q", "k", "v"})
_BACKWARD_TENSORS = _FORWARD_TENSORS | {"o", "d_o", "aux_ctx_tensors"}


class FusedAttention:
    """Forward and backward of dense or causal attention with one calling convention for all versions.

    The layers of a model make the same few calls over and over: what a call needs besides its tensors is put together
    when it comes for the first time, and the selector is asked then.

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
        self._prepared: dict[Call, tuple[dict[str, Any], dict[str, Any]]] = {}

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
        call = describe(query, key, value, tensor_format, causal, scale)
        arguments, _ = self._arguments(call)
        out, aux_ctx_tensors, *_ = self._symbols.fused_attn_fwd(**arguments, q=query, k=key, v=value)
        lse_GNT1 = aux_ctx_tensors[0]
        if tuple(lse_GNT1.shape) != (call.problems, query.shape[2], call.rows, 1):
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
        _, arguments = self._arguments(describe(query, key, value, tensor_format, causal, scale))
        tensors: dict[str, Any] = {"q": query, "k": key, "v": value, "o": out, "d_o": grad_out}
        tensors["aux_ctx_tensors"] = [lse_GNT1, _rng_state(query.device)]
        grads = self._symbols.fused_attn_bwd(**arguments, **tensors)
        return grads[0], grads[1], grads[2]

    def _arguments(self, call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what forward and backward get besides tensors, after asking the selector."""
        if call not in self._prepared:
            self._check_supported(call)
            common = self._common_arguments(call)
            # A generator of its own: by default every call moves the device's, by a number of tiles in which ranks
            # differ.
            forward = {**common, "is_training": True, "rng_gen": _generator(call.device)}
            backward = {
                **common,
                "deterministic": call.deterministic,
                "do_format": call.tensor_format,
                "dqkv_layout": call.layout,
            }
            if "dqkv_dtype" in self._backward_parameters:
                backward["dqkv_dtype"] = self._symbols.dtypes[call.dtype]
            of_version = self._of_this_version
            self._prepared[call] = (
                of_version(self._symbols.fused_attn_fwd, self._forward_parameters, forward, _FORWARD_TENSORS),
                of_version(self._symbols.fused_attn_bwd, self._backward_parameters, backward, _BACKWARD_TENSORS),
            )
        return self._prepared[call]

    def _common_arguments(self, call: Call) -> dict[str, Any]:
        """Return the arguments that both functions take."""
        return {
            "max_seqlen_q": call.rows,
            "max_seqlen_kv": call.keys,
            "cu_seqlens_q": _cumulative_lengths(call.problems, call.rows, call.device),
            "cu_seqlens_kv": _cumulative_lengths(call.problems, call.keys, call.device),
            "fake_dtype": call.dtype,
            "fused_attention_backend": self._symbols.backend,
            "attn_scale": call.scale,
            "dropout": 0.0,
            "qkv_layout": call.layout,
            "o_format": call.tensor_format,
            "attn_mask_type": call.mask,
            "attn_bias_type": "no_bias",
            "window_size": call.window,
        }

    def _check_supported(self, call: Call) -> None:
        """Ask Transformer Engine's selector."""
        description: dict[str, Any] = {
            "qkv_dtype": call.dtype,
            "qkv_layout": call.layout,
            "batch_size": call.problems,
            "num_heads": call.query_shape[2],
            "num_gqa_groups": call.key_shape[2],
            "max_seqlen_q": call.rows,
            "max_seqlen_kv": call.keys,
            "head_dim_qk": call.query_shape[3],
            "head_dim_v": call.query_shape[3],
            "attn_mask_type": call.mask,
            "window_size": call.window,
            # What the two functions take for granted with these mask types.
            "bottom_right_diagonal": False,
            "softmax_scale": call.scale,
            "core_attention_bias_type": "no_bias",
            "core_attention_bias_shape": None,
            # The default, True, makes the selector refuse deterministic training.
            "core_attention_bias_requires_grad": False,
            "attention_dropout": 0.0,
            "deterministic": call.deterministic,
            "is_training": True,
        }
        unknown = description.keys() - self._params_fields - _OPTIONAL
        if unknown:
            raise self._unknown_version("AttentionParams", unknown)
        params = {name: value for name, value in description.items() if name in self._params_fields}
        _, _, _, backend, _, available = self._symbols.get_attention_backend(self._symbols.attention_params(**params))
        # The selector may prefer another implementation; what counts here is that this one is among those it allows.
        if not available[1] or backend is None or int(backend) != int(self._symbols.backend):
            raise ValueError(self._refusal(description, available))

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

    def _of_this_version(
        self,
        function: Callable[..., Any],
        parameters: Mapping[str, inspect.Parameter],
        arguments: Mapping[str, Any],
        tensors: frozenset[str],
    ) -> dict[str, Any]:
        """Return those arguments that this version has; refuse a version that needs others, or lacks some."""
        given = arguments.keys() | tensors
        needed = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
        unknown = (needed - given) | (given - parameters.keys() - _OPTIONAL)
        if unknown:
            raise self._unknown_version(function.__name__, unknown)
        return {name: value for name, value in arguments.items() if name in parameters}

    def _unknown_version(self, name: str, parameters: set[str]) -> ValueError:
        return ValueError(
            f"--csbp-attention-backend transformer_engine: {name} of Transformer Engine {self._symbols.version} has "
            f"changed ({', '.join(sorted(parameters))}); tested are 2.9 to 2.20. Use --csbp-attention-backend torch."
        )


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
