# SPDX-License-Identifier: Apache-2.0
"""Decoding against a table of logits: what is kept in a pass, what the model is asked, where a text ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_csbp.generation.decoding import (
    AutoregressiveDecoder,
    BlockDecoder,
    BlockStep,
    ConfidenceThreshold,
    FixedSteps,
    TokenChoice,
    UncoverRule,
)

VOCAB, BLOCK, MASK = 12, 4, 10


@dataclass
class TableModel:
    """Row p predicts token `targets[p]`, more surely the further it is to the right in its block.

    Attributes:
        targets: by position.
        asked: what was asked, in order.
    """

    targets: Sequence[int]
    prefix: list[int] = field(default_factory=list)
    asked: list[tuple[str, list[int]]] = field(default_factory=list)

    def append(self, tokens: Sequence[int]) -> Tensor:
        self.asked.append(("append", list(tokens)))
        self.prefix += tokens
        return self._row(len(self.prefix) - 1)

    def denoise(self, tokens: Sequence[int]) -> Tensor:
        self.asked.append(("denoise", list(tokens)))
        return torch.stack([self._row(len(self.prefix) + i) for i in range(len(tokens))])

    def _row(self, position: int) -> Tensor:
        logits_V = torch.zeros(VOCAB)
        logits_V[self.targets[position]] = 2.0 + position % BLOCK
        logits_V[MASK] = 50.0  # never to be chosen
        return logits_V


def choice(temperature: float = 0.0, seed: int = 0) -> TokenChoice:
    return TokenChoice(VOCAB - 1, [MASK], temperature, seed)


def block_decoder(rule: UncoverRule, shifts: bool = False, steps: list[BlockStep] | None = None) -> BlockDecoder:
    return BlockDecoder(
        block_size=BLOCK,
        mask_token_id=MASK,
        shifts_targets=shifts,
        choose=choice(),
        rule=rule,
        on_step=None if steps is None else steps.append,
    )


ONE_A_PASS = ConfidenceThreshold(2.0)


def test_a_block_is_denoised_around_the_end_of_the_prompt_and_then_joins_the_prefix() -> None:
    model = TableModel(targets=[1, 2, 3, 4, 5, 6, 7, 8])
    generated = block_decoder(FixedSteps(1))(model, [9, 9], 6, eod=None)
    assert generated.tokens == [3, 4, 5, 6, 7, 8]
    assert model.asked == [
        ("denoise", [9, 9, MASK, MASK]),
        ("append", [9, 9, 3, 4]),
        ("denoise", [MASK, MASK, MASK, MASK]),
    ]
    assert generated.num_passes == 3


def test_whole_blocks_of_the_prompt_are_read_once() -> None:
    model = TableModel(targets=list(range(9)) * 2)
    block_decoder(FixedSteps(1))(model, [9] * 9, 1, eod=None)
    assert model.asked == [("append", [9] * 8), ("denoise", [9, MASK, MASK, MASK])]


def test_each_pass_keeps_what_reaches_the_threshold_and_else_the_surest_token() -> None:
    """Logits of 2, 3, 4, 5 among eleven tokens are probabilities of 0.42, 0.67, 0.85, 0.94."""
    steps: list[BlockStep] = []
    block_decoder(ConfidenceThreshold(0.8), steps=steps)(TableModel([1, 2, 3, 4]), [], 4, eod=None)
    assert [list(step.tokens) for step in steps] == [
        [MASK] * 4,
        [MASK, MASK, 3, 4],
        [MASK, 2, 3, 4],
        [1, 2, 3, 4],
    ]
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert [list(step.is_masked) for step in steps][1] == [True, True, False, False]


@pytest.mark.parametrize("num_steps, shares", [(1, [4]), (2, [2, 2]), (3, [2, 1, 1]), (4, [1] * 4), (9, [1] * 4)])
def test_fixed_steps_keep_equal_shares_surest_first(num_steps: int, shares: list[int]) -> None:
    steps: list[BlockStep] = []
    block_decoder(FixedSteps(num_steps), steps=steps)(TableModel([1, 2, 3, 4]), [], 4, eod=None)
    masked = [sum(step.is_masked) for step in steps]
    assert [before - after for before, after in pairwise(masked)] == shares
    assert steps[1].tokens[-1] == 4


def test_with_a_shift_row_i_predicts_token_i_plus_1_and_the_last_clean_row_the_first_of_a_block() -> None:
    model = TableModel(targets=[1, 2, 3, 4, 5, 6, 7, 8])
    generated = block_decoder(ONE_A_PASS, shifts=True)(model, [9], 7, eod=None)
    assert generated.tokens == [1, 2, 3, 4, 5, 6, 7]
    second_block = [tokens for kind, tokens in model.asked if kind == "denoise"][3]
    assert second_block == [4, MASK, MASK, MASK]


def test_with_a_shift_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no row that predicts token 0"):
        block_decoder(ONE_A_PASS, shifts=True)(TableModel([1]), [], 1, eod=None)


@pytest.mark.parametrize("eod, tokens", [(3, []), (6, [3, 4, 5]), (None, [3, 4, 5, 6, 7])])
def test_a_text_ends_before_the_end_of_the_document(eod: int | None, tokens: list[int]) -> None:
    targets = [1, 2, 3, 4, 5, 6, 7, 8]
    assert block_decoder(FixedSteps(1))(TableModel(targets), [9, 9], 5, eod).tokens == tokens
    assert AutoregressiveDecoder(choice())(TableModel(targets[1:]), [9, 9], 5, eod).tokens == tokens


def test_autoregression_reads_the_prompt_at_once_and_then_token_by_token() -> None:
    model = TableModel(targets=[1, 2, 3, 4, 5])
    generated = AutoregressiveDecoder(choice())(model, [9, 9], 3, eod=None)
    assert generated.tokens == [2, 3, 4]
    assert model.asked == [("append", [9, 9]), ("append", [2]), ("append", [3])]
    assert generated.num_passes == 3


def test_neither_the_mask_nor_the_padding_of_the_vocabulary_is_chosen() -> None:
    logits_RV = torch.zeros(1, VOCAB)
    logits_RV[0, [MASK, VOCAB - 1]] = 60.0
    for temperature in (0.0, 5.0):
        tokens = {int(choice(temperature, seed)(logits_RV.clone())[0]) for seed in range(40)}
        assert not tokens & {MASK, VOCAB - 1}


def test_draws_follow_the_tempered_softmax_and_the_seed() -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 1.0]]).expand(20_000, 3)
    tokens_R, probabilities_R = TokenChoice(3, [], temperature=0.5, seed=3)(logits_RV)
    shares = tokens_R.bincount(minlength=3) / tokens_R.numel()
    assert torch.allclose(shares, (logits_RV[0] / 0.5).softmax(0), atol=0.01)
    assert torch.equal(probabilities_R, logits_RV.softmax(1).gather(1, tokens_R[:, None])[:, 0])
    again_R, _ = TokenChoice(3, [], temperature=0.5, seed=3)(logits_RV)
    other_R, _ = TokenChoice(3, [], temperature=0.5, seed=4)(logits_RV)
    assert torch.equal(tokens_R, again_R)
    assert not torch.equal(tokens_R, other_R)


def test_logits_of_the_model_are_not_changed() -> None:
    logits_RV = torch.zeros(1, VOCAB)
    choice()(logits_RV)
    assert torch.equal(logits_RV, torch.zeros(1, VOCAB))
