# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's path on a CPU: its adapter against recorded versions, and whole groups on a stand-in.

Shapes: G problems, T rows, U keys, N query heads, K key/value heads, D head dim.
"""

import dataclasses
import importlib.util
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention
from megatron_csbp.transformer.kernels import transformer_engine
from megatron_csbp.transformer.kernels.reference import ReferenceKernel
from megatron_csbp.transformer.kernels.transformer_engine import TransformerEngineKernel
from megatron_csbp.transformer.kernels.transformer_engine_adapter import FusedAttention
from megatron_csbp.transformer.kernels.transformer_engine_symbols import import_symbols
from tests.support.attention_cases import DISTRIBUTED_SCHEMES, Case, attend_on_group
from tests.support.simulated_group import SimulatedCollectives
from tests.support.transformer_engine_signatures import SIGNATURES
from tests.support.transformer_engine_stand_in import StandIn

NAMES = ("out", "lse", "dq", "dk", "dv")
LAYOUT_ARGUMENTS = ("qkv_layout", "o_format", "do_format", "dqkv_layout")


def kernel_on(stand_in: StandIn) -> TransformerEngineKernel:
    return TransformerEngineKernel(FusedAttention(stand_in.symbols()))


def inputs(order: str, *, dtype: torch.dtype = torch.float64, keys: int = 7) -> list[Tensor]:
    """Gradient of the output, query, key and value for G = 3, N = 4, K = 2, in memory order "bshd" or "sbhd"."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 4, 8), (3, 5, 4, 8), (3, keys, 2, 8), (3, keys, 2, 8)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return tensors if order == "bshd" else [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]


def run(kernel: Any, grad_out: Tensor, *tensors: Tensor, causal: bool = False) -> dict[str, Tensor]:
    out, lse = kernel.forward(*tensors, causal=causal, scale=0.3)
    grads = kernel.backward(grad_out, *tensors, out, lse, causal=causal, scale=0.3)
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("order", ["bshd", "sbhd"])
@pytest.mark.parametrize("version", SIGNATURES)
def test_every_recorded_version_gives_the_reference(version: str, order: str, causal: bool) -> None:
    given = inputs(order, keys=5 if causal else 7)
    stand_in = StandIn(version, exact=True)
    got = run(kernel_on(stand_in), *given, causal=causal)
    expected = run(ReferenceKernel(), *given, causal=causal)
    for name in NAMES:
        torch.testing.assert_close(
            got[name], expected[name], atol=1e-13, rtol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )
    said = {call[name].split("_")[0] for call in stand_in.calls for name in LAYOUT_ARGUMENTS if name in call}
    assert said == {order}
    assert all(
        call[name] is given[i] or order == "sbhd" for call in stand_in.calls for i, name in [(1, "q"), (2, "k")]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_keeps_its_dtype_and_an_fp32_log_sum_exp(dtype: torch.dtype) -> None:
    given = inputs("bshd", dtype=dtype)
    got = run(kernel_on(StandIn()), *given)
    assert {name: tensor.dtype for name, tensor in got.items()} == dict.fromkeys(NAMES, dtype) | {"lse": torch.float32}
    exact = run(ReferenceKernel(), *(tensor.double() for tensor in given))
    dense = run(ReferenceKernel(), *given)
    for name in NAMES:
        allowed = 2 * (dense[name].double() - exact[name]).abs().max().item() + 1e-6
        assert (got[name].double() - exact[name]).abs().max().item() <= allowed, name


def test_strided_tensors_are_copied_since_strides_would_be_misread() -> None:
    given = inputs("bshd")
    fused = torch.cat([given[2], given[3]], dim=2)
    strided = [given[0], given[1], *fused.split(2, dim=2)]
    assert not strided[2].is_contiguous()
    got, expected = run(kernel_on(StandIn(exact=True)), *strided), run(ReferenceKernel(), *given)
    for name in NAMES:
        torch.testing.assert_close(got[name], expected[name], atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("version", ["2.9", "2.14", "2.20"])
@pytest.mark.parametrize("clean_attention", CleanAttention)
@pytest.mark.parametrize(
    "scheme, group_size", [(Scheme.SINGLE, 1), *((scheme, size) for scheme in DISTRIBUTED_SCHEMES for size in (2, 4))]
)
def test_a_whole_group_is_as_exact_as_on_the_torch_backend(
    scheme: Scheme,
    group_size: int,
    clean_attention: CleanAttention,
    version: str,
    simulated_collectives: SimulatedCollectives,
) -> None:
    case = Case(scheme=scheme, group_size=group_size, clean_attention=clean_attention, micro_batch_size=2)
    problem = case.problem()
    got = attend_on_group(case, problem, kernel=kernel_on(StandIn(version, exact=True)))
    errors = got.max_errors(case.dense(problem))
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_a_whole_group_in_bf16_errs_at_most_twice_as_much_as_dense_bf16(
    group_size: int, simulated_collectives: SimulatedCollectives
) -> None:
    case = Case(
        scheme=Scheme.SINGLE if group_size == 1 else Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL,
        group_size=group_size,
        block_size=8,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    given = case.problem().to(torch.bfloat16)
    exact = case.dense(given.to(torch.float64))
    dense = case.dense(given).max_errors(exact)
    got = attend_on_group(case, given, kernel=kernel_on(StandIn())).max_errors(exact)
    assert {part: error / dense[part] for part, error in got.items() if not error <= 2 * dense[part]} == {}


@pytest.mark.parametrize("by", ["torch", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"])
def test_deterministic_training_reaches_the_selector_and_the_backward(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn()
    kernel = kernel_on(stand_in)
    run(kernel, *inputs("bshd", dtype=torch.bfloat16))
    if by == "torch":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        monkeypatch.setenv(by, "0")
    run(kernel, *inputs("bshd", dtype=torch.bfloat16))
    assert [question.deterministic for question in stand_in.questions] == [False, True]
    assert [call["deterministic"] for call in stand_in.calls if "d_o" in call] == [False, True]


@pytest.mark.parametrize(
    "rows, keys, causal, mask",
    [
        (5, 5, True, "padding_causal"),
        (5, 7, False, "padding"),
        (128, 64, False, "padding"),
        (64, 128, False, "padding"),
        (128, 256, False, "no_mask"),
        (128, 128, True, "causal"),
    ],
)
def test_the_selector_is_asked_about_the_call_that_follows(rows: int, keys: int, causal: bool, mask: str) -> None:
    stand_in = StandIn("2.20", exact=True)
    query, key = torch.zeros(1, rows, 2, 8, dtype=torch.float64), torch.zeros(1, keys, 2, 8, dtype=torch.float64)
    run(kernel_on(stand_in), query, query, key, key, causal=causal)
    (question,) = stand_in.questions
    asked = {name: getattr(question, name) for name in ("attn_mask_type", "bottom_right_diagonal", "softmax_scale")}
    assert asked == {"attn_mask_type": mask, "bottom_right_diagonal": False, "softmax_scale": 0.3}
    assert [call["attn_mask_type"] for call in stand_in.calls] == [mask, mask]


def test_the_selector_is_asked_once_for_each_kind_of_call() -> None:
    stand_in = StandIn()
    kernel = kernel_on(stand_in)
    for _ in range(2):
        run(kernel, *inputs("bshd", dtype=torch.bfloat16))
    (question,) = stand_in.questions
    asked = {name: getattr(question, name) for name in ("batch_size", "num_heads", "num_gqa_groups", "max_seqlen_kv")}
    assert asked == {"batch_size": 3, "num_heads": 4, "num_gqa_groups": 2, "max_seqlen_kv": 7}


def test_what_a_call_needs_besides_tensors_is_put_together_once() -> None:
    stand_in = StandIn(exact=True)
    kernel = kernel_on(stand_in)
    for _ in range(2):
        run(kernel, *inputs("bshd"))
    first, again = ([call for call in stand_in.calls if ("d_o" in call) == backward] for backward in (False, True))
    for calls in (first, again):
        tensors = {"q", "k", "v", "o", "d_o", "aux_ctx_tensors"}
        assert all(calls[0][name] is calls[1][name] for name in calls[0].keys() - tensors)
    run(kernel, *(tensor[:2] for tensor in inputs("bshd")))
    assert [question.batch_size for question in stand_in.questions] == [3, 2]


def test_a_batch_beyond_the_launch_grid_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "CUDNN_PROBLEMS", 2)
    for order in ("bshd", "sbhd"):
        stand_in = StandIn(exact=True)
        got, expected = run(kernel_on(stand_in), *inputs(order)), run(ReferenceKernel(), *inputs(order))
        for name in NAMES:
            torch.testing.assert_close(got[name], expected[name], atol=1e-13, rtol=1e-13)
        assert [call["cu_seqlens_q"].numel() - 1 for call in stand_in.calls] == [2, 1, 2, 1]


@pytest.mark.parametrize(
    "stand_in, dtype",
    [
        (StandIn(), torch.float32),
        (StandIn(selects=(False, None)), torch.bfloat16),
        (StandIn(selects=(True, 0)), torch.bfloat16),
    ],
    ids=["fp32", "turned off", "a sub-backend without a log-sum-exp"],
)
def test_what_the_selector_does_not_allow_is_refused(stand_in: StandIn, dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=r"--csbp-attention-backend transformer_engine: .*--csbp-attention-backend to"
    ):
        run(kernel_on(stand_in), *inputs("bshd", dtype=dtype))
    assert stand_in.calls == []


def test_statistics_of_another_shape_are_refused() -> None:
    symbols = StandIn().symbols()
    wrong = replace(symbols, fused_attn_fwd=_with_scores_as_statistics(symbols.fused_attn_fwd))
    with pytest.raises(RuntimeError, match="not a log-sum-exp"):
        run(TransformerEngineKernel(FusedAttention(wrong)), *inputs("bshd", dtype=torch.bfloat16))


def _with_scores_as_statistics(function: Any) -> Any:
    def fused_attn_fwd(*args: Any, **kwargs: Any) -> Any:
        out, (lse, rng_state) = function(*args, **kwargs)
        return out, [lse.expand(-1, -1, -1, 7), rng_state]

    fused_attn_fwd.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return fused_attn_fwd


@pytest.mark.parametrize("change", ["a parameter that must be given", "a parameter that went"])
def test_a_version_with_other_parameters_is_refused_by_name(change: str) -> None:
    symbols = StandIn().symbols()

    def fused_attn_bwd(**kwargs: Any) -> None:
        raise AssertionError("must not be called")

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(symbols.fused_attn_bwd).parameters.values()
    ]
    if change == "a parameter that went":
        parameters = [parameter for parameter in parameters if parameter.name != "deterministic"]
    else:
        parameters.append(inspect.Parameter("new_one", inspect.Parameter.KEYWORD_ONLY))
    fused_attn_bwd.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    kernel = TransformerEngineKernel(FusedAttention(replace(symbols, fused_attn_bwd=fused_attn_bwd)))
    name = "deterministic" if change == "a parameter that went" else "new_one"
    with pytest.raises(ValueError, match=rf"fused_attn_bwd of Transformer Engine 2.20 has changed \({name}\)"):
        run(kernel, *inputs("bshd", dtype=torch.bfloat16))


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
def test_a_missing_transformer_engine_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"No module named 'transformer_engine'.*--csbp-attention-backend torch"):
        TransformerEngineKernel()


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed: its real signatures are not bound (CONTRIBUTING.md has the recipe)",
)
def test_the_installed_version_binds_every_argument() -> None:
    real = import_symbols()
    stand_in = StandIn(exact=False)
    recorded = stand_in.symbols()

    def bound(name: str) -> Any:
        def function(**kwargs: Any) -> Any:
            arguments = inspect.signature(getattr(real, name)).bind(**kwargs).arguments
            assert arguments.pop("dqkv_dtype", None) in (None, *real.dtypes.values())
            return getattr(recorded, name)(**arguments)

        function.__name__ = name
        function.__signature__ = inspect.signature(getattr(real, name))  # type: ignore[attr-defined]
        return function

    symbols = replace(
        real,
        fused_attn_fwd=bound("fused_attn_fwd"),
        fused_attn_bwd=bound("fused_attn_bwd"),
        get_attention_backend=lambda params: (False, None, True, real.backend, True, [False, True, True]),
    )
    assert dataclasses.is_dataclass(real.attention_params)
    run(TransformerEngineKernel(FusedAttention(symbols)), *inputs("bshd", dtype=torch.bfloat16))
    assert len(stand_in.calls) == 2
