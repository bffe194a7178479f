# SPDX-License-Identifier: Apache-2.0
"""A cluster's launch script runs on a CPU, and says what was changed for that."""

import pytest

from megatron_csbp.configuration import runtime_arguments
from megatron_csbp.configuration.runtime_arguments import adapt_to_runtime
from megatron_csbp.cpu_runtime import RuntimeInfo
from tests.support.megatron_arguments import parse

CPU = RuntimeInfo("cpu", "a test", threads=1)
CUDA = RuntimeInfo("cuda", "a test", threads=1)


@pytest.mark.parametrize(
    "flags, name, value",
    [
        ("--transformer-impl transformer_engine", "transformer_impl", "local"),
        ("", "no_persist_layer_norm", True),
        ("", "gradient_accumulation_fusion", False),
        ("", "masked_softmax_fusion", False),
        ("", "apply_rope_fusion", False),
        ("--distributed-backend nccl", "distributed_backend", "gloo"),
        ("--tp-comm-overlap", "tp_comm_overlap", False),
        ("--moe-permute-fusion", "moe_permute_fusion", False),
        ("--moe-router-fusion", "moe_router_fusion", False),
        ("--use-transformer-engine-op-fuser", "use_transformer_engine_op_fuser", False),
    ],
)
def test_what_names_cuda_code_is_changed_and_told(flags: str, name: str, value: object) -> None:
    args, _ = parse(flags)
    before = getattr(args, name)
    assert before != value
    changes = {change.name: change for change in adapt_to_runtime(args, CPU)}
    assert getattr(args, name) == value
    assert (changes[name].before, changes[name].after) == (before, value)
    assert changes[name].reason.startswith("CPU runtime: ")


def test_what_already_fits_is_not_told() -> None:
    args, _ = parse("--transformer-impl local --no-rope-fusion")
    names = {change.name for change in adapt_to_runtime(args, CPU)}
    assert not {"transformer_impl", "apply_rope_fusion"} & names
    assert adapt_to_runtime(args, CPU) == []


OPTIONAL = {"transformer_engine.pytorch", "apex", "fused_weight_gradient_mlp_cuda", "scaled_masked_softmax_cuda"}


@pytest.mark.parametrize(
    "installed, changed",
    [
        (OPTIONAL, set()),
        (
            set(),
            {
                "transformer_impl": "local",
                "apply_rope_fusion": False,
                "gradient_accumulation_fusion": False,
                "no_persist_layer_norm": True,
                "masked_softmax_fusion": False,
            },
        ),
        (
            {"transformer_engine.pytorch"},
            {"gradient_accumulation_fusion": False, "no_persist_layer_norm": True, "masked_softmax_fusion": False},
        ),
        (OPTIONAL - {"transformer_engine.pytorch"}, {"transformer_impl": "local", "apply_rope_fusion": False}),
    ],
    ids=["all", "none", "te", "apex"],
)
def test_on_cuda_what_is_not_installed_is_off(
    installed: set[str], changed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_arguments, "_imports", lambda module: module in installed)
    args, _ = parse("--tp-comm-overlap")
    before = dict(vars(args))
    changes = adapt_to_runtime(args, CUDA)
    assert {change.name: change.after for change in changes} == dict(changed)
    assert vars(args) == before | dict(changed)
    assert all("is not installed: no " in change.reason for change in changes)
    assert adapt_to_runtime(args, CUDA) == []


def test_a_package_is_asked_for_by_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_arguments._imports("json")
    assert not runtime_arguments._imports("no_such_package.of_any_kind")
    monkeypatch.setattr(runtime_arguments.importlib, "import_module", lambda module: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runtime_arguments._imports("broken")


def test_low_precision_formats_are_refused_on_a_cpu() -> None:
    args, _ = parse("--fp8-format hybrid")
    with pytest.raises(ValueError, match=r"--fp8-format hybrid needs a CUDA device.*--bf16"):
        adapt_to_runtime(args, CPU)


@pytest.mark.parametrize(
    "flags, instead",
    [
        ("--apply-layernorm-1p", "leave the flag out"),
        ("--profile", "add --use-pytorch-profiler"),
        ("--optimizer-cpu-offload", "leave the flag out"),
        ("--use-precision-aware-optimizer", "leave the flag out"),
        ("--cpu-offloading-num-layers 1", "leave the flag out"),
        ("--record-memory-history", "leave the flag out"),
        ("--log-straggler", "leave the flag out"),
    ],
)
def test_what_only_a_gpu_can_do_is_refused_on_a_cpu(flags: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_arguments, "_imports", lambda module: module in OPTIONAL)
    args, _ = parse(flags)
    assert adapt_to_runtime(args, CUDA) == []
    with pytest.raises(ValueError, match=f"^{flags.split()[0]} is not possible on a CPU: .*; {instead}"):
        adapt_to_runtime(args, CPU)


def test_block_diffusion_runs_have_zero_centred_norms_on_a_cpu() -> None:
    args, _ = parse("--apply-layernorm-1p --diffusion-block-size 8")
    adapt_to_runtime(args, CPU)
    assert args.layernorm_zero_centered_gamma


def test_pytorchs_profiler_runs_on_a_cpu() -> None:
    args, _ = parse("--profile --use-pytorch-profiler")
    adapt_to_runtime(args, CPU)
    assert args.profile
    assert args.use_pytorch_profiler
