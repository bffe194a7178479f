# SPDX-License-Identifier: Apache-2.0
"""The one definition of the mask, against the mask written out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import CLEAN
from megatron_csbp.transformer.geometry.visibility import (
    CleanAttention,
    Mask,
    WindowAnchor,
    all_rows,
    allowed_pairs,
    dense_mask,
    raw_lower,
    visibility,
)
from tests.support.geometry_cases import masks, samples
from tests.support.written_out_mask import written_out

TOKEN, BLOCK = CleanAttention.TOKEN_CAUSAL, CleanAttention.BLOCK_CAUSAL


def picture(mask: Mask, sample: Sample, copy: int) -> list[str]:
    """What the rows of a copy see of the clean copy and then of view 0: `x` for yes."""
    length = sample.length
    keys = np.tile(np.arange(length), 2), np.repeat([CLEAN, 0], length)
    seen = dense_mask(sample, mask, (np.arange(length), np.full(length, copy)), keys)
    rows = ["".join("x" if pair else "." for pair in row) for row in seen]
    return [f"{row[:length]} {row[length:]}" for row in rows]


def test_a_corrupted_block_sees_itself_and_earlier_clean_blocks() -> None:
    assert picture(Mask(TOKEN), Sample(6, 2), 0) == [
        "...... xx....",
        "...... xx....",
        "xx.... ..xx..",
        "xx.... ..xx..",
        "xxxx.. ....xx",
        "xxxx.. ....xx",
    ]


def test_a_clean_row_sees_earlier_tokens_or_its_block() -> None:
    assert picture(Mask(TOKEN), Sample(4, 2), CLEAN) == ["x... ....", "xx.. ....", "xxx. ....", "xxxx ...."]
    assert picture(Mask(BLOCK), Sample(4, 2), CLEAN) == ["xx.. ....", "xx.. ....", "xxxx ....", "xxxx ...."]


def test_a_window_counts_from_the_row_or_from_its_block() -> None:
    assert picture(Mask(TOKEN, 3), Sample(6, 2), 0)[4:] == ["..xx.. ....xx", "...x.. ....xx"]
    assert picture(Mask(TOKEN, 3, WindowAnchor.BLOCK), Sample(6, 2), 0)[4:] == ["..xx.. ....xx", "..xx.. ....xx"]
    assert picture(Mask(TOKEN, 3), Sample(6, 2), CLEAN)[4:] == ["..xxx. ......", "...xxx ......"]
    assert picture(Mask(BLOCK, 3), Sample(6, 2), CLEAN)[4:] == ["..xxxx ......", "...xxx ......"]


def test_documents_do_not_see_each_other_and_padding_sees_nothing() -> None:
    sample = Sample(8, 2, documents=np.array([(0, 3), (4, 6)]))
    assert picture(Mask(BLOCK), sample, 0) == [
        "........ xx......",
        "........ xx......",
        "xx...... ..x.....",  # the document's last block is cut at its end
        "xx...... ..x.....",
        "........ ....xx..",
        "........ ....xx..",
        "........ ........",
        "........ ........",
    ]
    assert picture(Mask(BLOCK), sample, CLEAN)[2:5] == ["xxx..... ........"] * 2 + ["....xx.. ........"]


@given(st.data())
@settings(max_examples=150)
def test_it_is_the_mask_written_out_by_hand(data: st.DataObject) -> None:
    block = data.draw(st.integers(1, 5))
    sample = data.draw(samples(data.draw(st.integers(1, 9)), block, st.sampled_from([1, 2])))
    mask = data.draw(masks(sample.length, block))
    positions, copies = all_rows(sample)
    expected = written_out(sample, mask, zip(copies.tolist(), positions.tolist(), strict=True))
    whole = np.tile(np.arange(sample.length), sample.num_views + 1), np.repeat([*sample.views, CLEAN], sample.length)
    assert (dense_mask(sample, mask, (positions, copies), whole) == expected).all()
    seen = visibility(sample, positions, copies, mask)
    assert (seen.lo <= seen.hi).all()
    assert (seen.own_start <= seen.own_stop).all()
    assert seen.num_pairs == expected.sum() == allowed_pairs(sample, mask)
    assert allowed_pairs(sample, mask, clean_queries=False) == expected[copies != CLEAN].sum()


def test_all_rows_are_views_first_and_skip_blocks_that_are_not_active() -> None:
    positions, copies = all_rows(Sample(4, 2, 2, active=np.array([[True, False], [False, True]])))
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert copies.tolist() == [0, 0, 1, 1, CLEAN, CLEAN, CLEAN, CLEAN]


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"window {window} must be at least 1 position; None turns it off"):
        Mask(TOKEN, window)


def test_only_a_window_has_a_lower_bound() -> None:
    with pytest.raises(AssertionError):
        raw_lower(3, 2, Mask(TOKEN), True)


def test_masks_say_whether_the_rows_of_a_block_see_alike() -> None:
    assert Mask(TOKEN).anchors_at_blocks
    assert Mask(TOKEN, 4, WindowAnchor.BLOCK).anchors_at_blocks
    assert not Mask(TOKEN, 4).anchors_at_blocks


def test_pairs_of_a_gemma_window_layer_fall_114_times() -> None:
    sample = Sample(262_144, 256)
    full = allowed_pairs(sample, Mask(TOKEN))
    window = allowed_pairs(sample, Mask(TOKEN, 1024, WindowAnchor.BLOCK))
    assert full / 1e9 == pytest.approx(68.75, abs=0.005)
    assert window / 1e9 == pytest.approx(0.603, abs=0.0005)
    assert full / window == pytest.approx(114, abs=0.5)
