# SPDX-License-Identifier: Apache-2.0
"""The planner's command line, comparison and sweep, without Megatron."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_csbp.tools.dry_run.checked_job import fill_what_is_open
from megatron_csbp.tools.dry_run.command import split
from megatron_csbp.tools.dry_run.network import Experts, Layer
from megatron_csbp.tools.dry_run.plan import compare, make_plan
from megatron_csbp.tools.dry_run.sweep import sweep
from megatron_csbp.tools.dry_run.text import comparison_lines, plan_lines, sweep_lines
from tests.unit_tests.tools.dry_run.jobs import CLUSTER, NEMOTRON_3B, job


def test_a_first_word_is_a_recipe_and_other_words_are_flags_of_the_job() -> None:
    options, words = split(["a.yaml", "--gpus", "16", "--seq-length", "64K", "--compare", "cp,csbp", "--bf16"])
    assert (options.gpus, options.gpu, options.compare) == (16, "h200", "cp,csbp")
    assert words == ["--yaml-cfg", "a.yaml", "--seq-length", "65536", "--bf16"]


@pytest.mark.parametrize(
    "line, said",
    [
        ("a.yaml", "the following arguments are required: --gpus"),
        ("a.yaml --gpus 0", "--gpus 0 must be at least 1"),
        ("a.yaml --gpus 8 --gpus-per-node 0", "--gpus-per-node 0 must be at least 1"),
        ("a.yaml --gpus 8 --seq-length 64KB", "--seq-length 64KB must be a number of tokens"),
        ("a.yaml --gpus 8 --json /none/x.json", "--json /none/x.json is a folder, or in one that does not exist"),
    ],
)
def test_wrong_options_are_refused(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split(line.split())


def test_what_a_recipe_leaves_open_is_filled_and_said(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("tokenizer:\n  tokenizer-type: HuggingFaceTokenizer\n  padded-vocab-size: 512\n")
    words, left = fill_what_is_open(["--yaml-cfg", str(recipe)])
    assert words[2:] == ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "511"]
    assert left == ("data (no --data-path)", "tokenizer (no --tokenizer-model for HuggingFaceTokenizer)")
    given = ["--yaml-cfg", str(recipe), "--data-path=a", "--tokenizer-model", "b"]
    assert fill_what_is_open(given) == (given, ())


def test_a_comparison_names_its_schemes() -> None:
    plans = compare(job(length=65_536, context=2), CLUSTER, ["cp", "bp", "csbp"])
    lines = comparison_lines(plans)
    assert [line.split()[0] for line in lines[2:5]] == ["cp", "bp", "csbp"]
    assert lines[-1] == "  (!) does not fit"
    with pytest.raises(ValueError, match="--compare ring must name some of cp, bp, csbp"):
        compare(job(), CLUSTER, ["ring"])
    with pytest.raises(ValueError, match="--compare needs a context group"):
        compare(job(context=1, scheme=job().topology.scheme.SINGLE), CLUSTER, ["cp"])


def test_a_sweep_is_in_order_and_says_why_others_do_not_work() -> None:
    candidates = sweep(job(length=65_536, global_batch=16), CLUSTER)
    fitting = [c.plan.time.seconds for c in candidates if c.plan is not None and not c.reason]
    assert fitting == sorted(fitting)
    reasons = {c.topology.name: c.reason for c in candidates if c.reason}
    assert "16 stages do not divide 40 layers" in reasons["DP 1 x PP 16"]
    assert "GiB too many" in reasons["DP 16"]
    lines = sweep_lines(candidates, limit=1)
    assert any(line.startswith("  flags of the best: --tensor-model-parallel-size") for line in lines)


def test_every_figure_of_a_plan_says_what_it_is() -> None:
    text = "\n".join(plan_lines(make_plan(job(), CLUSTER), ["data"]))
    for said in ("GiB [modelled]", "[context group: exact", "TFLOP [closed form]", "s [modelled]", "assumed"):
        assert said in text


def test_a_plan_with_experts_says_how_many_parameters_a_row_meets() -> None:
    routed = replace(NEMOTRON_3B, layers=(Layer(1, has_experts=True),), experts=Experts(number=8, chosen=2, ffn=1024))
    met = routed.parameters - 6 * 3 * routed.hidden * 1024
    text = "\n".join(plan_lines(make_plan(job(routed), CLUSTER), []))
    assert f"of which a row meets {met:,}" in text
    assert "of which a row meets" not in "\n".join(plan_lines(make_plan(job(NEMOTRON_3B), CLUSTER), []))
