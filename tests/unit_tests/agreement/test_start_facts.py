# SPDX-License-Identifier: Apache-2.0
"""What ranks compare at their start, and what is theirs alone."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_csbp.agreement.start_facts import argument_facts, start_facts
from megatron_csbp.configuration.checkpoint_rules import Start
from megatron_csbp.data.identity import data_identity
from tests.unit_tests.configuration.support import FLAGS, arguments


def facts(args: Namespace) -> dict[str, str]:
    return start_facts(args, Start(), FLAGS)


def run(flags: str = "", **changes: object) -> Namespace:
    ready = {"diffusion_scheme": "one rank", "clean_attention": "block-causal", "mock_data": True}
    return arguments(flags, **ready | changes)


def test_rank_and_place_are_not_compared() -> None:
    assert facts(run(rank=0, local_rank=0)) == facts(run(rank=9, local_rank=1))


def test_every_other_argument_is_compared_as_its_flag() -> None:
    found = argument_facts(run("--lr 0.5"), FLAGS)
    assert found["--lr"] == "0.5"
    missing = {name for name in vars(run()) if FLAGS.flag(name) not in found and name not in found}
    assert missing <= {"rank", "local_rank", "data_cache_path", "non_persistent_local_ckpt_dir"}


def test_objects_whose_text_could_hold_an_address_are_left_out() -> None:
    assert "--thing" not in argument_facts(Namespace(thing=object(), things=[object()]), FLAGS)


def test_seed_and_geometry_show_in_noise_and_plan() -> None:
    one, other = facts(run()), facts(run("--seed 8"))
    assert one["the noise of the seed"] != other["the noise of the seed"]
    assert one["the attention plan"] == other["the attention plan"]
    assert one["the attention plan"] != facts(run("--diffusion-block-size 16"))["the attention plan"]


def test_variables_that_change_a_step_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("HOSTNAME", "here")
    found = facts(run())
    assert found["NVTE_FUSED_ATTN"] == "0"
    assert "HOSTNAME" not in found


def test_data_of_the_same_size_and_another_end_are_told_apart(tmp_path: Path) -> None:
    args = run(mock_data=False, data_path=[str(tmp_path / "data")], tokenizer_model=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "data.idx").write_bytes(bytes(100))
    (tmp_path / "data.bin").write_bytes(bytes(200_000))
    before = data_identity(args)
    assert before[f"the data {tmp_path}/data"].startswith(".idx 100 bytes, .bin 200000 bytes, digest ")
    (tmp_path / "data.bin").write_bytes(bytes(199_999) + b"1")
    after = data_identity(args)
    assert {name for name in before if before[name] != after[name]} == {f"the data {tmp_path}/data"}
    (tmp_path / "tokenizer.json").write_text("[]")
    assert data_identity(args)[f"the tokenizer {tmp_path}"] != after[f"the tokenizer {tmp_path}"]


def test_data_that_a_plain_run_names_may_be_of_another_kind(tmp_path: Path) -> None:
    """What is needed of files is checked elsewhere; JSON Lines of Megatron's own fine-tuning have no index."""
    (tmp_path / "chats.jsonl").write_text("{}\n")
    args = run(
        mock_data=False, data_path=[str(tmp_path / "chats.jsonl"), str(tmp_path / "none")], tokenizer_model=None
    )
    found = data_identity(args)
    assert found[f"the data {tmp_path}/chats.jsonl"].startswith(".jsonl 3 bytes, digest ")
    assert found[f"the data {tmp_path}/none"].startswith("no file, digest ")
