# SPDX-License-Identifier: Apache-2.0
"""Rows with a weight are selected, each with its own target and weight, and no other row."""

import torch

from megatron_csbp.loss.row_losses import select_loss_rows

TARGETS_BS = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
IS_CORRUPTED_S = torch.tensor([True, True, False, False])


def test_selects_the_rows_with_a_weight_of_all_sequences() -> None:
    weights_BS = torch.tensor([[0.0, 0.5, 0.0, 2.0], [3.0, 0.25, 0.0, 0.0]])
    selection = select_loss_rows(TARGETS_BS, weights_BS, IS_CORRUPTED_S)
    # Row and sequence alternate as in hidden states [S, B, H].
    assert selection.rows_R.tolist() == [1, 2, 3, 6]
    assert selection.targets_R.tolist() == [20, 11, 21, 13]
    assert selection.weights_R.tolist() == [3.0, 0.5, 0.25, 2.0]
    assert selection.corrupted_R.tolist() == [True, True, True, False]


def test_rows_select_the_same_from_hidden_states_as_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    weights_BS = torch.rand(2, 4, generator=generator) * torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    hidden_SBH = torch.randn(4, 2, 3, generator=generator)
    selection = select_loss_rows(TARGETS_BS, weights_BS, IS_CORRUPTED_S)
    by_hand = [
        (hidden_SBH[s, b], TARGETS_BS[b, s], weights_BS[b, s]) for s in range(4) for b in range(2) if weights_BS[b, s]
    ]
    picked_RH = hidden_SBH.flatten(0, 1)[selection.rows_R]
    assert len(by_hand) == len(picked_RH)
    for (hidden_H, target, weight), row_H, target_r, weight_r in zip(
        by_hand, picked_RH, selection.targets_R, selection.weights_R, strict=True
    ):
        assert hidden_H.equal(row_H)
        assert (target, weight) == (target_r, weight_r)


def test_without_any_weight_one_row_of_weight_0_remains() -> None:
    selection = select_loss_rows(TARGETS_BS, torch.zeros(2, 4), IS_CORRUPTED_S)
    assert selection.rows_R.tolist() == [0]
    assert selection.weights_R.tolist() == [0.0]


def test_a_negative_weight_is_a_weight() -> None:
    selection = select_loss_rows(TARGETS_BS, torch.tensor([[0.0, -1.0, 0, 0], [0, 0, 0, 0]]), IS_CORRUPTED_S)
    assert selection.rows_R.tolist() == [2]
