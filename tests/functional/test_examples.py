# SPDX-License-Identifier: Apache-2.0
"""Model files pass every check at their own world size, and train when made small; the job script runs dry."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_run import ROOT, Ranks

MODELS = ROOT / "examples" / "models"
JOB_SCRIPT = ROOT / "examples" / "slurm" / "pretrain.sbatch"
# The tokenizer's tokens less the end-of-document token that Megatron's stand-in tokenizer adds.
STAND_IN_VOCABULARY = {"nemotron": 131_071, "qwen3": 151_668}
WORLD_SIZES = {
    "nemotron_labs_diffusion_3b": 8,
    "nemotron_labs_diffusion_8b": 16,
    "nemotron_labs_diffusion_14b": 32,
    "qwen3_0.6b": 8,
    "qwen3_8b": 16,
}
SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 16 --seq-length 256 --max-position-embeddings 256 --make-vocab-size-divisible-by 16 "
    "--vocab-size 187 --mask-token-id 190 --global-batch-size 2 --train-iters 3 --lr-warmup-iters 1 --eval-iters 1 "
    "--eval-interval 3 --log-interval 1 --num-workers 0 --context-parallel-size 2 --bp-size 2"
)
WITHOUT_DATA = "--mock-data --tokenizer-type NullTokenizer --split 90,5,5"


def from_file(name: str, *arguments: str) -> list[str]:
    return ["--yaml-cfg", str(MODELS / f"{name}.yaml"), *WITHOUT_DATA.split(), *arguments]


def validated(name: str, ranks: Ranks, folder: Path, *, as_on_hopper: bool = False) -> dict[str, Any]:
    vocabulary = STAND_IN_VOCABULARY[name.split("_")[0]]
    arguments = from_file(name, "--vocab-size", str(vocabulary))
    request = {
        "arguments": arguments,
        "world_size": WORLD_SIZES[name],
        "facts": str(folder / "facts.json"),
        "as_on_hopper": as_on_hopper,
    }
    ranks.call("tests.support.example_arguments:validate", request).check()
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def test_every_model_file_is_tested() -> None:
    assert {path.stem for path in MODELS.iterdir()} == set(WORLD_SIZES)


@pytest.mark.parametrize("as_on_hopper", [False, True], ids=["CPU", "Hopper"])
@pytest.mark.parametrize("name", WORLD_SIZES)
def test_a_model_file_passes_all_checks_at_its_world_size(
    name: str, as_on_hopper: bool, ranks: Ranks, tmp_path: Path
) -> None:
    facts = validated(name, ranks, tmp_path, as_on_hopper=as_on_hopper)
    assert facts["diffusion_scheme"] == "CSBP"
    assert facts["data_parallel_size"] == 1
    assert facts["context_parallel_size"] == facts["block_parallel_size"] == 8
    assert facts["seq_length"] == 2 * facts["clean_seq_length"] == 2 * (16_384 if "qwen3" in name else 262_144)
    if name.startswith("qwen3"):
        assert facts["padded_vocab_size"] == 151_936
        assert facts["model"]["qk_layernorm"] is True
    else:
        assert facts["padded_vocab_size"] == 131_072
        assert facts["model"]["yarn_rotary_scaling_factor"] == 16.0
        assert facts["model"]["yarn_original_max_position_embeddings"] == 16_384


@pytest.mark.parametrize(
    "name, world_size, size",
    [("qwen3_0.6b", 2, []), ("nemotron_labs_diffusion_8b", 4, ["--tensor-model-parallel-size", "2"])],
)
def test_a_model_file_trains_when_made_small(name: str, world_size: int, size: list[str], ranks: Ranks) -> None:
    arguments = from_file(name, *SMALL.split(), *size)
    run = ranks.train(arguments, world_size).check()
    losses = run.losses()
    assert len(losses) == 3
    assert all(0.0 < loss < 10.0 for loss in losses)
    assert run.evaluated("nelbo")[0] > 0.0


def test_a_model_file_trains_as_on_a_gpu_without_transformer_engine_and_apex(ranks: Ranks) -> None:
    arguments = [*from_file("nemotron_labs_diffusion_8b", *SMALL.split()), "--tensor-model-parallel-size", "2"]
    run = ranks.train(arguments, 4, hooks=["tests.support.pretended_gpu:pretend_hopper"]).check()
    assert len(run.losses()) == 3
    for line in (
        "note: CUDA_DEVICE_MAX_CONNECTIONS was not set; it is 1 now",
        "transformer_impl: transformer_engine -> local (Transformer Engine is not installed",
        "gradient_accumulation_fusion: True -> False (Apex' fused weight gradient",
        "no_persist_layer_norm: False -> True (Apex' persistent layer norm is not installed: no apex)",
        "apply_rope_fusion: True -> False",
    ):
        assert line in run.output


def dry_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(JOB_SCRIPT), "--dry-run", *arguments]
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_job_script_prints_one_task_for_each_node_and_one_rank_for_each_gpu(tmp_path: Path) -> None:
    file = tmp_path / "a b.yaml"
    file.write_text((MODELS / "qwen3_8b.yaml").read_text())
    arguments = ["--yaml-cfg", str(file), *WITHOUT_DATA.split(), "--vocab-size", "151668"]
    run = dry_run(*arguments, SLURM_NNODES="4", MASTER_ADDR="node7", GPUS_PER_NODE="8")
    assert run.returncode == 0, run.stderr
    assert "this job would start on 32 rank(s)" in run.stdout
    assert "srun --nodes 4 --ntasks 4 --ntasks-per-node 1" in run.stdout
    assert "--nnodes 4 --nproc-per-node 8" in run.stdout
    assert run.stdout.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 srun ")
    assert "--rdzv-endpoint node7:29500" in run.stdout
    assert "-m megatron_csbp.pretrain_gpt" in run.stdout
    assert rf"--yaml-cfg {tmp_path}/a\ b.yaml" in run.stdout


def test_the_job_script_refuses_what_would_not_start_before_the_queue() -> None:
    """A model file for 32 ranks on 16, and data that are not there; both known without a GPU."""
    model = ["--yaml-cfg", str(MODELS / "nemotron_labs_diffusion_14b.yaml")]
    run = dry_run(*model, *WITHOUT_DATA.split(), SLURM_NNODES="2")
    assert run.returncode == 2
    assert "needs a multiple of 32 ranks, and this job has 16" in run.stderr
    assert "start it on 4 nodes of 8" in run.stderr


def test_the_job_script_refuses_a_model_file_that_is_not_there() -> None:
    run = dry_run("--yaml-cfg", "none.yaml")
    assert run.returncode == 2
    assert "--yaml-cfg none.yaml is not a file here" in run.stderr


def test_the_job_script_takes_the_other_entry_and_words_for_srun() -> None:
    entry = "-m megatron_csbp.launch tests/functional/stock_shape_pretrain_gpt.py"
    flags = from_file("qwen3_0.6b", "--vocab-size", "151668")
    run = dry_run(*flags, ENTRY=entry, SRUN_ARGS="--container-image=image --no-container-mount-home")
    assert run.returncode == 0, run.stderr
    assert "this job would start on 8 rank(s)" in run.stdout
    assert f"{entry} --" in run.stdout
    assert "--container-image=image --no-container-mount-home" in run.stdout


def test_the_job_script_outside_a_job_says_what_to_do() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    run = subprocess.run(["bash", str(JOB_SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "submit with sbatch" in run.stderr


def test_shellcheck_finds_nothing_in_the_job_script() -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: the style of the job script was not checked")
    run = subprocess.run([shellcheck, str(JOB_SCRIPT)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
