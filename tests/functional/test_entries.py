# SPDX-License-Identifier: Apache-2.0
"""The two entries: plain Megatron without our flags, one and the same run with them, under torchrun too."""

import re
from pathlib import Path

import pytest

from tests.functional.model_flags import (
    BLOCK_DIFFUSION,
    BLOCKS,
    CSBP2,
    NEMOTRON,
    PP2,
    TIED,
    TP2,
    UNTIED_MQA,
    iterations,
    words,
)
from tests.support.megatron_run import Finished, Ranks, torchrun

SCRIPT = str(Path(__file__).with_name("stock_shape_pretrain_gpt.py"))
PER_TOKEN = ["--calculate-per-token-loss"]
ON_CPU = words(
    "--transformer-impl local --no-rope-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --distributed-backend gloo"
)
"""What Megatron has to be told on a machine without CUDA. The entries find out for themselves."""
PLAIN = {
    "one rank": ([*TIED, *PER_TOKEN], 1),
    "dp2, mean of micro-batches": (UNTIED_MQA, 2),
    "tp2": ([*UNTIED_MQA, *TP2], 2),
    "pp2": ([*TIED, *PP2], 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "pp2" else []) for name in PLAIN]
)
def test_without_our_flags_both_entries_are_plain_megatron(name: str, ranks: Ranks) -> None:
    """Every loss, gradient norm and evaluation, to the last bit."""
    flags, world_size = PLAIN[name]
    arguments = [*flags, *iterations(5, evaluate=True)]
    plain = ranks.train([SCRIPT, *arguments, *ON_CPU], world_size, entry="plain").check()
    launched = ranks.train([SCRIPT, *arguments], world_size, entry="launch").check()
    ours = ranks.train(arguments, world_size).check()
    assert len(plain.losses()) == 5
    assert len(plain.evaluated("lm loss")) >= 2
    assert launched.records == plain.records
    assert ours.records == plain.records
    assert "block diffusion: off" in ours.output
    assert "block diffusion: off" in launched.output
    assert "megatron_csbp" not in plain.output


@pytest.mark.parametrize(
    "flags", [[*TIED, *NEMOTRON], [*UNTIED_MQA, *BLOCK_DIFFUSION]], ids=["nemotron", "block-diffusion"]
)
def test_an_unmodified_script_trains_like_our_entry(flags: list[str], ranks: Ranks) -> None:
    arguments = [*flags, *CSBP2, *iterations(3, evaluate=True)]
    launched = ranks.train([SCRIPT, *arguments], 2, entry="launch").check()
    ours = ranks.train(arguments, 2).check()
    assert len(ours.losses()) == 3
    assert launched.records == ours.records
    assert {"lm loss", "nelbo"} <= ours.records[-1]["losses"].keys()


def logged(run: Finished) -> list[tuple[str, str]]:
    """Return loss and gradient norm as Megatron's log prints them, but of the second iteration.

    Megatron does not start a new mean after the first: what it prints for the second is the mean of both.
    """
    first, _, *rest = re.findall(r"lm loss: (\S+) .* grad norm: (\S+) \|", run.output)
    return [first, *rest]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(["-m", "megatron_csbp.pretrain_gpt"], id="ours", marks=pytest.mark.slow),
        pytest.param(["-m", "megatron_csbp.launch", SCRIPT], id="an unmodified script"),
    ],
)
def test_torchrun_runs_the_entries(entry: list[str], ranks: Ranks) -> None:
    """Nothing of the tests is in these ranks; they log what the forked ranks of the other tests have recorded."""
    arguments = [*TIED, *NEMOTRON, *CSBP2, *iterations(3)]
    forked = ranks.train(arguments, 2).check()
    run = torchrun([*entry, *arguments], 2).check()
    expected = [(f"{a:.6E}", f"{b:.3f}") for a, b in zip(forked.losses(), forked.grad_norms, strict=True)]
    assert logged(run) == [expected[0], expected[2]]
    assert run.output.count("---------------- megatron_csbp ") == 1


def test_the_start_summary_says_what_runs(ranks: Ranks) -> None:
    summary = ranks.train([*TIED, *BLOCKS, *CSBP2, *iterations(1)], 2).check().output.partition("megatron_csbp ")[2]
    for line in (
        "device: cpu (--device cpu)",
        "scheme: CSBP over 2 rank(s); tensor 1 x pipeline 1 x data 1",
        "objective: block-diffusion, clean attention block-causal, noise log-linear eps 0.001",
        "mask token 190: no token of the tokenizer, which has 187",
        "64 clean tokens, 8 blocks of 8, 4 chunks of 16; 64 rows per rank",
        "rank 0 owns chunks 0 (blocks 0-1), 3 (blocks 6-7)",
        "rank 1 owns chunks 1 (blocks 2-3), 2 (blocks 4-5)",
        "attention backend: torch (--csbp-attention-backend auto; the run is on a CPU)",
        "corrupted copies: 0 bytes",
        "calculate_per_token_loss: False -> True",
        "hidden_dropout: 0.1 -> 0.0",
        "seq_length: 64 -> 128",
    ):
        assert line in summary
