# SPDX-License-Identifier: Apache-2.0
"""Launch scripts in the styles that are about: arrays, continued lines, strings, SLURM, files of flags."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_csbp.configuration.unsupported_features import UNSUPPORTED
from megatron_csbp.migrate.edits import Migration
from megatron_csbp.migrate.job_script import migrate_script
from megatron_csbp.migrate.rules import _GONE, _OF_THE_MODEL, FlagRules, Wanted
from megatron_csbp.migrate.shell_script import read_launch
from tests.support.megatron_arguments import parser

ARRAYS = """#!/bin/bash
# Trains a small model on one node.
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODE_GPUS=${NODE_GPUS:-8}
CKPT=$1          # where to save
CP=4
LAUNCHER=(--nproc_per_node $NODE_GPUS --nnodes 1 --master_port 6001)
MODEL=(
    --delay-grad-reduce
    --num-layers 24   # as published
    --hidden-size 2048
    --seq-length 8192
    --step-batch-size-schedule "0:16 2.4B:320"
    --attention-dropout 0.1
    --context-parallel-size $CP
    --cp-comm-type a2a
)
if [[ "$FP8" == yes ]]; then
    MODEL+=(
        "--fp8-format hybrid"
        "--qk-clip"
    )
fi
PATHS=(--save "$CKPT" --load "$CKPT" --data-path $2)
MODEL+=("${PATHS[@]}")
torchrun ${LAUNCHER[@]} \\
    pretrain_gpt.py \\
    ${MODEL[@]}
"""

CONTINUED = """set -x
python -m torch.distributed.launch --nproc_per_node 8 \\
       pretrain_gpt.py \\
       --tensor-model-parallel-size 2 --context-parallel-size 2 \\
       --num-layers 12 \\
       --reset-position-ids \\
       --ckpt-format torch \\
       --seq-length 4000 \\
       --micro-batch-size 4
"""

STRING = """CHECKPOINTS=/data/run
OPTIONS=" \\
    --num-layers 48 --mtp-num-layers 1 \\
    --context-parallel-size 8 \\
    --load ${CHECKPOINTS} \\
    --made-up-flag 3 \\
    --rampup-batch-size 32 32 1000 \\
    --bf16"
torchrun --nproc-per-node 8 /opt/megatron/pretrain_gpt.py ${OPTIONS}
"""

SLURM = """#!/bin/bash
#SBATCH --nodes=4 --exclusive
DIR=$(pwd)
options="--num-layers 32 --bf16 --use-distributed-optimizer \\
 --cuda-graph-impl local --seq-length 131072"
run_cmd="python -u ${DIR}/pretrain_gpt.py ${options}"
srun -l --container-image img.sqsh --container-mounts "/a:/a" sh -c "echo start"
srun -l --container-image img.sqsh python -u ${MEGATRON:-/opt/megatron}/pretrain_gpt.py ${options}
"""

FLAGS = "--num-layers 2\n--seq-length 256\n--context-parallel-size 2\n--qk-clip\n"


def migrate(text: str, wanted: Wanted | None = None) -> Migration:
    return migrate_script("job.sh", text, FlagRules(parser()), wanted or Wanted(mask_token=190))


def reasons(migration: Migration) -> str:
    return "\n".join(edit.reason for edit in migration.edits)


def test_flags_are_found_through_arrays_conditions_defaults_and_comments() -> None:
    launch = read_launch(ARRAYS)
    assert launch is not None
    given = {flag.flag: flag.values for flag in launch.flags}
    assert given["--context-parallel-size"] == ("4",)
    assert given["--num-layers"] == ("24",)
    assert given["--step-batch-size-schedule"] == ("0:16 2.4B:320",)
    assert given["--fp8-format"] == ("hybrid",)
    assert given["--save"] == (None,), "only the caller knows $1"
    assert "--master_port" not in given, "it is the launcher's"


def test_a_script_of_arrays_is_changed_in_its_places_only() -> None:
    migration = migrate(ARRAYS)
    changed = [line for line in migration.diff.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == [
        "-    --delay-grad-reduce",
        "-    --attention-dropout 0.1",
        "-    --cp-comm-type a2a",
        '-        "--qk-clip"',
        "-    pretrain_gpt.py \\",
        "+    -m megatron_csbp.launch pretrain_gpt.py --bp-size $CP --diffusion-block-size 32 --mask-token-id 190 \\",
    ]
    assert migration.obstacles == []
    assert "--attention-dropout 0.1 is left out: the tiles of a row cannot share a dropout mask" in reasons(migration)
    assert "--delay-grad-reduce is left out: not a flag of Megatron-Core 0.19" in reasons(migration)
    assert any("add --finetune to the first start" in note for note in migration.notes)
    assert set(migration.unknown) == {"--save", "--load", "--data-path"}
    assert migration.flags[-4:] == ["--bp-size", "4", "--diffusion-block-size", "32"]


def test_continued_lines_stay_continued() -> None:
    migration = migrate(CONTINUED)
    assert "       --num-layers 12 \\\n       --ckpt-format torch_dist \\\n" in migration.after
    assert "pretrain_gpt.py --bp-size 2 --diffusion-block-size 32 --mask-token-id 190 \\\n" in migration.after
    assert migration.obstacles == [
        "--seq-length 4000 must be a multiple of 2 x 2 ranks x block size 32 = 128: use 3968 or 4096"
    ]


def test_options_in_a_string_are_changed_inside_it() -> None:
    migration = migrate(STRING)
    assert "-m megatron_csbp.launch /opt/megatron/pretrain_gpt.py --bp-size 8 " in migration.after
    assert "--rampup-batch-size" not in migration.after
    assert '    --made-up-flag 3 \\\n    --bf16"\n' in migration.after
    model, unknown = migration.obstacles
    assert model.startswith("line 3: --mtp-num-layers 1: not supported with block diffusion: multi-token prediction")
    assert unknown.startswith("line 6: --made-up-flag 3: not a flag of Megatron-Core 0.19")


def test_a_slurm_script_is_changed_where_python_starts() -> None:
    migration = migrate(SLURM, Wanted(context=8))
    added = "--context-parallel-size 8 --bp-size 8 --diffusion-block-size 32 --mask-token-id MASK_TOKEN_ID"
    launch = f"python -u -m megatron_csbp.launch ${{MEGATRON:-/opt/megatron}}/pretrain_gpt.py {added} ${{options}}"
    assert launch in migration.after
    assert "--cuda-graph-impl none --seq-length 131072" in migration.after
    assert migration.obstacles == []


def test_another_context_size_replaces_the_one_that_is_there() -> None:
    migration = migrate(CONTINUED, Wanted(context=8, block_size=25))
    assert "--tensor-model-parallel-size 2 --context-parallel-size 8 \\\n" in migration.after
    assert "--bp-size 8 --diffusion-block-size 25" in migration.after
    assert migration.obstacles == []
    place = migration.flags.index("--context-parallel-size")
    assert migration.flags.count("--context-parallel-size") == 1
    assert migration.flags[place + 1] == "8"


def test_a_file_of_flags_gets_its_own_at_the_end() -> None:
    migration = migrate(FLAGS)
    assert migration.after == (
        "--num-layers 2\n--seq-length 256\n--context-parallel-size 2\n"
        "--bp-size 2\n--diffusion-block-size 32\n--mask-token-id 190\n"
    )


def test_without_context_parallelism_nothing_is_sharded_and_it_says_how() -> None:
    migration = migrate("torchrun pretrain_gpt.py --num-layers 2\n")
    assert "--bp-size" not in migration.after
    assert any("--context-size P spreads it" in note for note in migration.notes)


def test_a_script_of_another_model_is_told() -> None:
    (obstacle,) = migrate("torchrun pretrain_bert.py --num-layers 2\n").obstacles
    assert "trains another kind of model (bert)" in obstacle


def test_a_file_that_starts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"job.sh starts no training script .* give the file that holds"):
        migrate("echo hello\nls pretrain_gpt.py\n")


@pytest.mark.parametrize("script", [ARRAYS, CONTINUED, STRING, SLURM])
def test_the_diff_applies_and_the_result_is_a_script(script: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(script)
    migration = migrate(script)
    (tmp_path / "change").write_text(migration.diff)
    if shutil.which("patch") is not None:
        subprocess.run(["patch", "-p0", "-s", "-i", "change"], cwd=tmp_path, check=True)
        assert file.read_text() == migration.after
    file.write_text(migration.after)
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


def test_flags_that_are_said_to_be_gone_are() -> None:
    known = {option for action in parser()._actions for option in action.option_strings}
    assert known.isdisjoint(_GONE)


def test_features_that_make_another_model_are_refused_ones() -> None:
    assert set(_OF_THE_MODEL) <= {feature.name for feature in UNSUPPORTED}
