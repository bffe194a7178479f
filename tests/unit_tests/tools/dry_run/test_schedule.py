# SPDX-License-Identifier: Apache-2.0
"""Which exchanges hide behind which tiles, in cases that can be told by hand."""

import pytest

from megatron_csbp.tools.dry_run.schedule import AttentionParts, Span, backward, forward


def parts(**values: float) -> AttentionParts:
    settings = {"local": 4.0, "gathered": 6.0, "gather": 3.0, "groups": 2} | values
    return AttentionParts(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "gather, expected",
    [
        (3.0, Span(4 + 6 + 6, 0.0)),  # hidden: the first behind local tiles, the second behind the first group's
        (5.0, Span(5 + 6 + 6, 1.0)),  # the first is late by one
        (8.0, Span(8 + 8 + 6, 4.0 + 2.0)),
    ],
)
def test_forward(gather: float, expected: Span) -> None:
    assert forward(parts(gather=gather)) == expected


def test_without_an_exchange_there_is_nothing_to_wait_for() -> None:
    alone = parts(groups=0, gather=0.0)
    assert forward(alone) == Span(10.0, 0.0)
    assert backward(alone, keys_at_hand=False) == Span(10.0, 0.0)


def test_backward_gathers_again_unless_the_keys_are_there() -> None:
    late = parts(gather=5.0, reduce=1.0, beside_reduces=4.0)
    assert backward(late, keys_at_hand=False) == Span(5 + (6 + 2) * 2, 1.0)
    assert backward(late, keys_at_hand=True) == Span(4 + (6 + 2) * 2, 0.0)


def test_sums_of_gradients_hide_behind_the_local_tiles_that_are_kept_for_them() -> None:
    assert backward(parts(reduce=3.0, beside_reduces=4.0), keys_at_hand=True) == Span(4 + (6 + 3) * 2, 2 * 1.0)
