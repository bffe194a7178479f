# SPDX-License-Identifier: Apache-2.0
"""Arguments are said as the user types them, switches that store False included."""

from argparse import ArgumentParser

import pytest

from megatron_csbp.configuration.flag_names import FlagNames


@pytest.fixture
def flags() -> FlagNames:
    parser = ArgumentParser()
    parser.add_argument("--bp-size", "--block-parallel-size", dest="block_parallel_size", type=int)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--coefficients", nargs="+", type=float)
    return FlagNames(parser)


@pytest.mark.parametrize(
    "name, before, now, said",
    [
        ("block_parallel_size", 2, 4, "--block-parallel-size 4 differs from 2; Use --block-parallel-size 2"),
        (
            "block_parallel_size",
            None,
            4,
            "--block-parallel-size 4 is given and was not; Leave out --block-parallel-size",
        ),
        ("block_parallel_size", 2, None, "--block-parallel-size is not given and was; Add --block-parallel-size 2"),
        ("swiglu", True, False, "--swiglu is not given and was; Add --swiglu"),
        ("swiglu", False, True, "--swiglu is given and was not; Leave out --swiglu"),
        ("add_bias_linear", False, True, "--disable-bias-linear is not given and was; Add --disable-bias-linear"),
        (
            "add_bias_linear",
            True,
            False,
            "--disable-bias-linear is given and was not; Leave out --disable-bias-linear",
        ),
        ("clean_seq_length", 64, 128, "--seq-length 128 differs from 64; Use --seq-length 64"),
        ("coefficients", [0.1], [0.1, 2.0], "--coefficients 0.1 2.0 differs from 0.1; Use --coefficients 0.1"),
        ("of_no_flag", 1, 2, "--of-no-flag 2 differs from 1; Use --of-no-flag 1"),
        ("of_no_flag", False, True, "--of-no-flag is given and was not; Leave out --of-no-flag"),
    ],
)
def test_says_a_difference_and_a_remedy(flags: FlagNames, name: str, before: object, now: object, said: str) -> None:
    assert "; ".join(flags.difference(name, before, now)) == said
