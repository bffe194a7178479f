# SPDX-License-Identifier: Apache-2.0
"""The job script, dry and under a stand-in for SLURM that starts real processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import INTERFACE, Network, why_unavailable
from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, TIED, iterations
from tests.functional.test_examples import NAMES, WITHOUT_DATA, from_file
from tests.support import fake_slurm
from tests.support.megatron_run import ROOT, Ranks, read_records

JOB_SCRIPT = ROOT / "examples" / "slurm" / "pretrain.sbatch"
COUNTING = str(ROOT / "tests" / "support" / "counting_entry.py")


def dry_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(JOB_SCRIPT), "--dry-run", *arguments]
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_job_script_prints_one_task_for_each_gpu_of_each_node(tmp_path: Path) -> None:
    file = tmp_path / "a b.yaml"
    file.write_text(NAMES["qwen_ar_to_bdlm/8b_32k"].path.read_text())
    arguments = ["--yaml-cfg", str(file), *WITHOUT_DATA.split(), "--vocab-size", "151668"]
    run = dry_run(*arguments, SLURM_NNODES="4", MASTER_ADDR="node7", GPUS_PER_NODE="8")
    assert run.returncode == 0, run.stderr
    assert "dry run: 32 x h200, 4 node(s) of 8; DP 16 x CSBP 2" in run.stdout
    assert "every check of a start passed" in run.stdout
    assert "srun --nodes 4 --ntasks 32 --ntasks-per-node 8" in run.stdout
    assert run.stdout.startswith("MASTER_ADDR=node7 MASTER_PORT=20000 CUDA_DEVICE_MAX_CONNECTIONS=1\n")
    assert "-m megatron_csbp.pretrain_gpt" in run.stdout
    assert rf"--yaml-cfg {tmp_path}/a\ b.yaml" in run.stdout


def test_the_job_script_refuses_what_would_not_start_before_the_queue() -> None:
    """A job for 32 ranks on 16, known without a GPU."""
    flags = from_file("nemotron_diffusion/14b_256k", "--pipeline-model-parallel-size", "4")
    run = dry_run(*flags, SLURM_NNODES="2")
    assert run.returncode == 2
    assert "needs a multiple of 32 ranks, and this job has 16" in run.stderr
    assert "start it on 4 nodes of 8" in run.stderr


def test_the_job_script_refuses_a_model_file_that_is_not_there() -> None:
    run = dry_run("--yaml-cfg", "none.yaml")
    assert run.returncode == 2
    assert "--yaml-cfg none.yaml is not a file here" in run.stderr


def test_the_job_script_takes_the_other_entry_a_container_and_words_for_srun(tmp_path: Path) -> None:
    entry = "-m megatron_csbp.launch tests/functional/stock_shape_pretrain_gpt.py"
    flags = [*from_file("qwen_ar_to_bdlm/0.6b_32k", "--vocab-size", "151668"), "--save", str(tmp_path)]
    run = dry_run(*flags, ENTRY=entry, CONTAINER_IMAGE="image", CONTAINER_MOUNTS="/a:/a", SRUN_ARGS="--label")
    assert run.returncode == 0, run.stderr
    assert "this job would start on 8 rank(s)" in run.stdout
    assert f"{entry} --" in run.stdout
    assert f"--label --container-image image --container-mounts /a:/a --container-workdir {ROOT}" in run.stdout
    assert f"--save {tmp_path} --load {tmp_path} --exit-signal-handler" in run.stdout


def test_the_job_script_outside_a_job_says_what_to_do() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    run = subprocess.run(["bash", str(JOB_SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "submit with sbatch" in run.stderr


def test_shellcheck_finds_nothing_in_the_job_script() -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck is not None, "the test extra brings it"
    run = subprocess.run([shellcheck, str(JOB_SCRIPT)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def submit(
    folder: Path, options: list[str], arguments: list[str], timeout: float = 60.0, **environment: str
) -> tuple[int, str]:
    """Submit the script in a folder of its own; return the status and the log of the (first) job."""
    namespaces = environment.pop("namespaces", "").split()
    nodes = [Network.address(node) for node in range(2)] if namespaces else ["127.0.0.1", "127.0.0.2"]
    commands = folder / "slurm"
    commands.mkdir()
    environ = fake_slurm.install(commands, nodes=nodes, namespaces=namespaces)
    environ |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment
    sizes = ["--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1"]
    command = ["sbatch", *sizes, *options, str(JOB_SCRIPT), *arguments]
    run = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert run.stderr == ""
    return run.returncode, "\n".join(path.read_text() for path in sorted(folder.glob("csbp-*.log")))


def iterations_of(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("iteration")]


def test_a_preempted_job_saves_and_goes_on_after_it_is_queued_again(tmp_path: Path) -> None:
    flags = ["--save", "run", "--train-iters", "30"]
    warn = "logs/*/start-0/rank-0.log iteration 5"
    status, log = submit(tmp_path, [], flags, ENTRY=COUNTING, DOCTOR="0", FAKE_SLURM_WARN=warn)
    assert status == 0, log
    assert log.count("asked to stop: the ranks save and end") == 1
    starts = sorted((tmp_path / "logs" / "csbp-4242").iterdir())
    assert [start.name for start in starts] == ["start-0", "start-1"]
    first, second = (iterations_of(start / "rank-0.log") for start in starts)
    assert first + second == list(range(1, 31))
    assert 5 <= len(first) < 30
    assert "of 2 ranks at 127.0.0.1" in (starts[1] / "rank-1.log").read_text()


def test_a_rank_that_fails_ends_the_job_and_the_next_of_the_array_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".megatron_csbp.lock").write_text(json.dumps({"job": "4243"}))
    flags = ["--save", "run", "--train-iters", "12", "--fail-at", "6"]
    status, log = submit(tmp_path, ["--array", "1-3%1"], flags, ENTRY=COUNTING, DOCTOR="0")
    assert status == 0, log
    assert "1 error: rank 1 fails" in log
    assert "error: the ranks ended with status 1; see logs/csbp-4243/start-0/rank-*.log" in log
    assert "the run is complete: nothing is left to train" in log
    done = [iterations_of(tmp_path / f"logs/csbp-{job}/start-0/rank-1.log") for job in (4243, 4244, 4245)]
    assert done == [list(range(1, 6)), list(range(6, 13)), []]
    assert not (tmp_path / "run" / ".megatron_csbp.lock").exists()


def test_a_preempted_job_that_saves_nothing_is_not_queued_again(tmp_path: Path) -> None:
    warn = "logs/*/start-0/rank-1.log iteration 2"
    status, log = submit(tmp_path, [], ["--train-iters", "60"], ENTRY=COUNTING, DOCTOR="0", FAKE_SLURM_WARN=warn)
    assert status == 1
    assert "preempted, and without --save nothing is kept" in log


def test_a_job_that_the_doctor_finds_not_sound_does_not_start(tmp_path: Path) -> None:
    """A stand-in for the doctor that has found something, since the real one takes half a minute."""
    doctor = tmp_path / "megatron_csbp"
    doctor.mkdir()
    (doctor / "__init__.py").touch()
    said = "[fail] port 29500: is taken\\n  fix: export MASTER_PORT=29501"
    (doctor / "doctor.py").write_text(f"import os, sys\nprint('{said}')\nsys.exit(int(os.environ['RANK'] == '0'))\n")
    status, log = submit(tmp_path, [], ["--train-iters", "1"], ENTRY=COUNTING)
    assert status == 1
    assert "[fail] port 29500: is taken\n  fix: export MASTER_PORT=29501\n" in log
    assert "error: the doctor found this job not sound; see logs/csbp-4242/start-0/doctor-0.log" in log
    assert not (tmp_path / "logs/csbp-4242/start-0/rank-0.log").exists()


@pytest.mark.slow
@pytest.mark.root
def test_a_preempted_training_is_the_undisturbed_one(ranks: Ranks, tmp_path: Path) -> None:
    """Two nodes in network namespaces of their own, the doctor first, and a signal in the middle of the run."""
    missing = why_unavailable()
    if missing is not None:
        pytest.skip(f"preemption of a real run on two nodes was not tried: {missing}")
    flags = [*TIED, *BLOCK_DIFFUSION, *CSBP2, *iterations(60)]
    whole = ranks.train(flags, 2).check()
    records = tmp_path / "records.jsonl"
    environment = {
        "ENTRY": f"-m tests.support.recorded_command {records}",
        "FAKE_SLURM_WARN": 'records.jsonl "iteration": 20',
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    with Network(2) as network:
        status, log = submit(
            tmp_path,
            [],
            [*flags, "--save", str(tmp_path / "run")],
            timeout=900,
            namespaces=" ".join(network.namespace(node) for node in range(2)),
            **environment,
        )
    assert status == 0, log
    assert "doctor: sound: 0 failure(s)" in log
    assert log.count("asked to stop: the ranks save and end") == 1
    found = {
        record["iteration"]: record["losses"]["lm loss"]
        for record in read_records(records)
        if record["kind"] == "train"
    }
    assert [found[number] for number in range(1, 61)] == whole.losses()
    starts = sorted((tmp_path / "logs" / "csbp-4242").iterdir())
    assert len(starts) == 2
    assert "goes on after iteration" in (starts[1] / "rank-0.log").read_text()
