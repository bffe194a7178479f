# SPDX-License-Identifier: Apache-2.0
"""What the start summary says of a scheme."""

import pytest

from megatron_csbp.reporting.start_summary import scheme_notes
from megatron_csbp.transformer.geometry.scheme import Scheme
from tests.unit_tests.objectives.support import layouts_of


def test_pure_bp_says_what_it_costs() -> None:
    (note,) = scheme_notes(layouts_of(64, 4, Scheme.BLOCK_PARALLEL, 4)[1])
    assert "keeps all 64 clean rows on each of the 4 ranks: 80 rows a rank" in note
    assert "2.50 times those of CSBP (--context-parallel-size 4)" in note


def test_the_baseline_says_that_it_is_one() -> None:
    (note,) = scheme_notes(layouts_of(64, 4, Scheme.CONTEXT_PARALLEL, 2)[0])
    assert "the CP baseline" in note


@pytest.mark.parametrize("scheme, size", [(Scheme.SINGLE, 1), (Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, 2)])
def test_nothing_is_said_of_the_others(scheme: Scheme, size: int) -> None:
    assert scheme_notes(layouts_of(64, 4, scheme, size)[0]) == []
