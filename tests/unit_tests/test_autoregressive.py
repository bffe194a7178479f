# SPDX-License-Identifier: Apache-2.0
"""What only Megatron-LM's own script does is refused by name, with the command that does it."""

import pytest

from megatron_csbp.autoregressive import check_supported
from tests.support.megatron_arguments import parse


@pytest.mark.parametrize(
    "flags",
    [
        "--sft",
        "--fim-data",
        "--hybrid-context-parallel",
        "--dataloader-inter-document-masking",
        "--mtp-num-layers 1",
        "--logits-load-dir logits",
        "--perform-rl-step",
        "--overlap-moe-expert-parallel-comm",
    ],
)
def test_refuses_what_only_the_stock_script_does(flags: str) -> None:
    with pytest.raises(ValueError, match=f"^{flags.split()[0]} ") as error:
        check_supported(parse(flags)[0])
    assert "python -m megatron_csbp.launch path/to/Megatron-LM/pretrain_gpt.py" in str(error.value)


def test_a_plain_run_passes() -> None:
    check_supported(parse("--mock-data --seq-length 64 --bf16 --eod-mask-loss --reset-position-ids")[0])
