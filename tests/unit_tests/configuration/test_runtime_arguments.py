# SPDX-License-Identifier: Apache-2.0
"""A cluster's launch script runs on a CPU, and says what was changed for that."""

import pytest

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


def test_cuda_changes_nothing() -> None:
    args, _ = parse("--tp-comm-overlap")
    before = dict(vars(args))
    assert adapt_to_runtime(args, CUDA) == []
    assert vars(args) == before


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
def test_what_only_a_gpu_can_do_is_refused_on_a_cpu(flags: str, instead: str) -> None:
    args, _ = parse(flags)
    assert adapt_to_runtime(args, CUDA) == []
    with pytest.raises(ValueError, match=f"^{flags.split()[0]} is not possible on a CPU: .*; {instead}"):
        adapt_to_runtime(args, CPU)


def test_pytorchs_profiler_runs_on_a_cpu() -> None:
    args, _ = parse("--profile --use-pytorch-profiler")
    adapt_to_runtime(args, CPU)
