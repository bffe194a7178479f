# SPDX-License-Identifier: Apache-2.0
"""Which rows carry loss; and their losses, in one piece and in chunks, with Megatron's own cross-entropy.

Shapes: S rows, B micro-batch, H hidden size, R rows with loss, V vocabulary.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from megatron_csbp import megatron_compat
from megatron_csbp.loss.row_losses import LossRowSelection, RowLosses, select_loss_rows
from megatron_csbp.tools.attention_step import fake_group
from megatron_csbp.tools.memory_meter import AllocationMeter

S, B, H, V = 24, 2, 16, 4096
MASK_ID = 7
TARGETS_BS = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
IS_CORRUPTED_S = torch.tensor([True, True, False, False])

CONFIG = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=False)


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


class OutputLayer(torch.nn.Module):
    """Like Megatron's: takes a weight of another module, returns logits and a bias, and knows of sequence parallelism.

    Attributes:
        rows: how many rows each call had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequence_parallel = False
        self.rows: list[int] = []

    def forward(self, rows_R1H: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        assert not self.sequence_parallel, "it would gather rows that are whole already"
        self.rows.append(rows_R1H.shape[0])
        return rows_R1H @ weight.t(), None


@pytest.fixture(autouse=True)
def one_tensor_parallel_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(megatron_compat, "first_vocabulary_id", lambda vocab, padded: 0)
    with fake_group(1, 0):
        yield


def selection() -> LossRowSelection:
    generator = torch.Generator().manual_seed(0)
    weights = (torch.rand(B, S, generator=generator) < 0.8).float()
    targets = torch.randint(V, (B, S), generator=generator)
    for row in (0, 1):  # clean and corrupted: a data token like any other
        targets[0, row], weights[0, row] = MASK_ID, 1.0
    return select_loss_rows(targets, weights, torch.arange(S) % 3 > 0)


def losses(
    chunk_rows: int, layer: OutputLayer, rows: LossRowSelection, *inputs: Tensor, config: Any = CONFIG
) -> Tensor:
    def cross_entropy(labels: Tensor, logits: Tensor) -> Tensor:
        group = torch.distributed.group.WORLD
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous(), tp_group=group).t()

    return RowLosses(MASK_ID, V, chunk_rows)(
        hidden_states=inputs[0],
        output_layer=layer,
        output_weight=inputs[1],
        compute_language_model_loss=cross_entropy,
        scale_logits=lambda logits: logits * 1.5,
        config=config,
        context=rows,
    )


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(S, B, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    return hidden, weight


@pytest.mark.parametrize("chunk_rows", [1, 7, 16, 1000])
def test_chunks_have_the_loss_and_the_gradients_of_one_piece(chunk_rows: int) -> None:
    rows, given = selection(), inputs()
    expected = losses(0, OutputLayer(), rows, *given)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected_grads = torch.autograd.grad(expected, given, upstream)
    layer = OutputLayer()
    got = losses(chunk_rows, layer, rows, *given)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    for grad, expected_grad in zip(torch.autograd.grad(got, given, upstream), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)
    count = rows.rows_R.numel()
    chunks = [min(chunk_rows, count - first) for first in range(0, count, chunk_rows)]
    # One piece is computed once; chunks once more in the backward pass.
    assert sorted(layer.rows) == sorted(chunks * (1 if len(chunks) == 1 else 2))


def test_the_mask_token_is_excluded_but_where_it_is_the_target() -> None:
    rows, (hidden, weight) = selection(), (tensor.detach() for tensor in inputs())
    hidden[..., 0], weight[MASK_ID], weight[MASK_ID, 0] = 1.0, 0.0, 20.0  # the likeliest token of every row
    logits = (hidden.flatten(0, 1)[rows.rows_R] @ weight.t() * 1.5).double()
    excluded = rows.corrupted_R & (rows.targets_R != MASK_ID)
    assert 0 < excluded.sum() < excluded.numel()
    is_target = rows.targets_R == MASK_ID
    assert (is_target & rows.corrupted_R).any()
    assert (is_target & ~rows.corrupted_R).any()
    assert (logits.softmax(-1)[excluded, MASK_ID] > 0.01).all()
    logits[excluded, MASK_ID] = -torch.inf
    expected = torch.nn.functional.cross_entropy(logits, rows.targets_R, reduction="none")
    for chunk_rows in (0, 7):
        got = losses(chunk_rows, OutputLayer(), rows, hidden, weight).double()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert got.isfinite().all()


@pytest.mark.parametrize(
    "first, column", [(MASK_ID - 5, 5), (MASK_ID, 0), (MASK_ID - 7, 7), (MASK_ID - 8, None), (MASK_ID + 1, None)]
)
def test_the_rank_that_has_the_mask_tokens_logit_excludes_it(
    first: int, column: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tokens of the vocabulary on a tensor-parallel rank, from `first` on."""
    monkeypatch.setattr(megatron_compat, "first_vocabulary_id", lambda vocab, padded: first)
    logits, excludes = torch.randn(3, 1, 8), torch.tensor([True, False, True])
    found = RowLosses(MASK_ID, V)._without_token(MASK_ID, logits, excludes)
    expected = logits.clone()
    if column is not None:
        expected[excludes, :, column] = -torch.inf
    assert torch.equal(found, expected)


@pytest.mark.parametrize("chunk_rows", [0, 4])
def test_logits_of_one_chunk_are_alive_at_most(chunk_rows: int) -> None:
    rows, given = selection(), inputs(torch.bfloat16)
    with AllocationMeter() as meter:
        losses(chunk_rows, OutputLayer(), rows, *given).sum().backward()
    chunk = chunk_rows or rows.rows_R.numel()
    assert rows.rows_R.numel() > 30
    assert meter.largest_elements == max(chunk, H) * V, "the largest tensor is one chunk of logits, or the weight"
    # Logits three times in bf16 (scaled, and masked), their softmax and its gradient in fp32; the weight's gradient
    # of one chunk and the sum.
    assert meter.peak_bytes < chunk * V * (3 * 2 + 2 * 4) + 3 * 2 * V * H


def test_the_output_layer_is_left_as_it_was_and_gathers_nothing_in_the_repeated_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(sequence_parallel=True, gradient_accumulation_fusion=False)
    monkeypatch.setattr(megatron_compat, "gather_sequence", lambda hidden, config: hidden)
    layer = OutputLayer()
    layer.sequence_parallel = True
    loss = losses(7, layer, selection(), *inputs(), config=config)
    assert layer.sequence_parallel
    loss.sum().backward()
    assert layer.sequence_parallel


def test_a_rank_without_loss_computes_one_row_of_weight_0() -> None:
    rows = select_loss_rows(torch.zeros(B, S, dtype=torch.int64), torch.zeros(B, S), torch.ones(S, dtype=torch.bool))
    assert rows.rows_R.tolist() == [0]
    assert rows.weights_R.tolist() == [0.0]
    assert losses(7, OutputLayer(), rows, *inputs()).shape == (1,)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["hidden state", "logits"])
def test_the_row_of_a_rank_without_loss_can_poison_neither_loss_nor_gradients(where: str, value: float) -> None:
    rows = select_loss_rows(torch.zeros(B, S, dtype=torch.int64), torch.zeros(B, S), torch.ones(S, dtype=torch.bool))
    hidden, weight = inputs()
    if where == "hidden state":
        with torch.no_grad():
            hidden[0, 0, 3] = value

    class Layer(OutputLayer):
        def forward(self, rows_R1H: Tensor, weight: Tensor) -> tuple[Tensor, None]:
            logits, _ = super().forward(rows_R1H, weight)
            return (
                logits + torch.zeros(V).index_fill(0, torch.tensor(5), value) if where == "logits" else logits
            ), None

    loss = (losses(0, Layer(), rows, hidden, weight) * rows.weights_R).sum()
    assert loss.item() == 0.0
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    assert not grad_hidden.any()
    assert not grad_weight.any()
