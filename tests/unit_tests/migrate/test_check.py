# SPDX-License-Identifier: Apache-2.0
from megatron_csbp.migrate.check import how_to_plan, with_stand_ins

STAND_INS = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "151936", "--mask-token-id", "151927"]


def test_the_check_does_without_the_files_of_the_job() -> None:
    words = ["--num-layers", "2", "--data-path", "1", "a", "2", "b", "--bf16", "--save", "x", "--lr", "1"]
    assert with_stand_ins(words) == ["--num-layers", "2", "--bf16", "--lr", "1", *STAND_INS]


def test_the_plan_is_of_the_changed_job_with_stand_ins_and_words_quoted_for_a_shell() -> None:
    flags = ["--num-layers", "2", "--save", "x", "--pipeline-model-parallel-layout", "Ett|L"]
    assert how_to_plan(flags, ["--data-path"], 16) == (
        "plan its memory, bytes and time, here with a vocabulary of 151,936: python -m megatron_csbp.dry_run "
        f"--num-layers 2 --pipeline-model-parallel-layout 'Ett|L' {' '.join(STAND_INS)} --gpus 16"
    )


def test_what_the_script_does_not_know_is_asked_for_and_files_are_not() -> None:
    said = how_to_plan(["--num-layers", "2"], ["--save", "--seq-length", "--seq-length", "--lr"], None)
    assert "151,936; add --seq-length --lr, whose values the script does not know: python -m" in said
    assert said.endswith(" --gpus N")


def test_a_yaml_file_is_planned_by_its_name() -> None:
    assert how_to_plan(["--yaml-cfg", "a.yaml"], [], 8).endswith(": python -m megatron_csbp.dry_run FILE --gpus 8")
