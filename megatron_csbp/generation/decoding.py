# SPDX-License-Identifier: Apache-2.0
"""How tokens are chosen: a block of masks is uncovered in a few passes, or one token follows the other.

Knows a model only as something that appends clean tokens to a prefix and scores a block behind it.
Shapes: V vocabulary, M rows of a block, R masked rows of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class PrefixModel(Protocol):
    """A model with a clean prefix that grows."""

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Read clean tokens behind the prefix, which then includes them; return the last row's logits, [V]."""

    def denoise(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [M, V] of a corrupted block behind the prefix, which stays as it is."""


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Uncovers every token whose probability reaches the threshold, and always the most probable one.

    Attributes:
        probability: the threshold.
    """

    probability: float

    def uncovered(self, confidence_R: Tensor, step: int) -> Tensor:
        """Return which masked rows become tokens in this step, bool [R]."""
        chosen_R = confidence_R >= self.probability
        chosen_R[confidence_R.argmax()] = True
        return chosen_R


@dataclass(frozen=True)
class FixedSteps:
    """Uncovers equal shares of the masked rows, the most probable tokens first.

    Attributes:
        num_steps: passes for a block; fewer if it has fewer masks.
    """

    num_steps: int

    def uncovered(self, confidence_R: Tensor, step: int) -> Tensor:
        """Return which masked rows become tokens in this step, bool [R]."""
        count = -(-confidence_R.numel() // max(1, self.num_steps - step))
        chosen_R = torch.zeros_like(confidence_R, dtype=torch.bool)
        chosen_R[confidence_R.topk(count).indices] = True
        return chosen_R


UncoverRule = ConfidenceThreshold | FixedSteps


@dataclass
class TokenChoice:
    """Chooses a token for each row, and says how sure the model is of it.

    Ranks of a tensor-parallel group hold the same gathered logits and the same seed, so they choose alike.

    Attributes:
        vocab_size: token ids of the tokenizer; logits beyond are padding.
        forbidden_token_ids: ids that are never chosen, such as the mask.
        temperature: 0 for the most probable token, else logits are divided by it and a token is drawn.
        seed: of the draws.
    """

    vocab_size: int
    forbidden_token_ids: Sequence[int] = ()
    temperature: float = 0.0
    seed: int = 0
    _generator: torch.Generator | None = field(default=None, init=False)

    def __call__(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens [R] and their probabilities [R] at temperature 1."""
        logits_RV = logits_RV[:, : self.vocab_size].float().clone()
        forbidden = [token for token in self.forbidden_token_ids if token < logits_RV.shape[1]]
        logits_RV[:, forbidden] = -torch.inf
        probabilities_RV = logits_RV.softmax(dim=1)
        if self.temperature == 0:
            tokens_R = logits_RV.argmax(dim=1)
        else:
            if self._generator is None:
                self._generator = torch.Generator(logits_RV.device).manual_seed(self.seed)
            tempered_RV = (logits_RV / self.temperature).softmax(dim=1)
            tokens_R = torch.multinomial(tempered_RV, 1, generator=self._generator).squeeze(1)
        return tokens_R, probabilities_RV.gather(1, tokens_R[:, None]).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class BlockStep:
    """What a block looks like after one pass.

    Attributes:
        first_position: of the block.
        step: passes so far; 0 is before the first.
        tokens: of the block.
        is_masked: which of them are still masks.
    """

    first_position: int
    step: int
    tokens: Sequence[int]
    is_masked: Sequence[bool]


@dataclass(frozen=True)
class Generated:
    """What came out.

    Attributes:
        tokens: new tokens, without the prompt and without the end of the document.
        num_passes: forward passes of the model, those over the prompt included.
    """

    tokens: list[int]
    num_passes: int


@dataclass(frozen=True, kw_only=True)
class BlockDecoder:
    """Block-by-block denoising.

    Attributes:
        block_size: M; blocks start at multiples of it, as in training.
        mask_token_id: stands for a token that is not known yet.
        shifts_targets: whether row i - 1 predicts token i; else each row predicts its own.
        choose: chooses tokens.
        rule: which of them to keep in a pass.
        on_step: called after each pass over a block.
    """

    block_size: int
    mask_token_id: int
    shifts_targets: bool
    choose: TokenChoice
    rule: UncoverRule
    on_step: Callable[[BlockStep], None] | None = None

    def __call__(self, model: PrefixModel, prompt: Sequence[int], max_new_tokens: int, eod: int | None) -> Generated:
        """Write at most `max_new_tokens` tokens behind a prompt; `eod` ends the text.

        Raises:
            ValueError: targets are shifted and the prompt is empty: no row predicts the first token.
        """
        if self.shifts_targets and not prompt:
            raise ValueError("--prompt is empty, but a model with shifted targets has no row that predicts token 0.")
        known = list(prompt)
        first = len(known) // self.block_size * self.block_size
        last_V, passes = None, 0
        if first:
            last_V, passes = model.append(known[:first]), 1
        while True:
            block, block_passes = self._denoise(model, first, known[first:], last_V)
            known = known[:first] + block
            passes += block_passes
            new = known[len(prompt) : len(prompt) + max_new_tokens]
            if eod in new:
                return Generated(new[: new.index(eod)], passes)
            if len(new) == max_new_tokens:
                return Generated(new, passes)
            last_V, passes, first = model.append(block), passes + 1, first + self.block_size

    def _denoise(
        self, model: PrefixModel, first: int, known: Sequence[int], last_V: Tensor | None
    ) -> tuple[list[int], int]:
        """Uncover one block.

        Args:
            model: with the tokens before the block in its prefix.
            first: position of the block.
            known: its first tokens, from the prompt.
            last_V: logits of the last clean row before it.

        Returns:
            The block's tokens, and the passes that they took.
        """
        num_masked = self.block_size - len(known)
        tokens_M = torch.tensor([*known, *[self.mask_token_id] * num_masked])
        is_masked_M = torch.arange(self.block_size) >= len(known)
        step = 0
        self._show(first, step, tokens_M, is_masked_M)
        if self.shifts_targets and num_masked == self.block_size:
            # The last clean row predicts the first token, whatever is uncovered behind it.
            assert last_V is not None, "a block without known tokens has a prefix"
            tokens_M[0] = self.choose(last_V[None])[0].cpu()
            is_masked_M[0] = False
        while is_masked_M.any():
            logits_MV = model.denoise(tokens_M.tolist())
            rows_R = is_masked_M.nonzero().squeeze(1)
            predicting_R = rows_R - 1 if self.shifts_targets else rows_R
            tokens_R, confidence_R = (
                chosen.cpu() for chosen in self.choose(logits_MV[predicting_R.to(logits_MV.device)])
            )
            uncovered_R = self.rule.uncovered(confidence_R, step)
            tokens_M[rows_R[uncovered_R]] = tokens_R[uncovered_R]
            is_masked_M[rows_R[uncovered_R]] = False
            step += 1
            self._show(first, step, tokens_M, is_masked_M)
        return tokens_M.tolist(), step

    def _show(self, first: int, step: int, tokens_M: Tensor, is_masked_M: Tensor) -> None:
        if self.on_step is not None:
            self.on_step(
                BlockStep(first_position=first, step=step, tokens=tokens_M.tolist(), is_masked=is_masked_M.tolist())
            )


@dataclass(frozen=True)
class AutoregressiveDecoder:
    """One token after the other, each from the last clean row.

    Attributes:
        choose: chooses tokens.
    """

    choose: TokenChoice

    def __call__(self, model: PrefixModel, prompt: Sequence[int], max_new_tokens: int, eod: int | None) -> Generated:
        """Write at most `max_new_tokens` tokens behind a prompt; `eod` ends the text.

        Raises:
            ValueError: the prompt is empty: no row predicts the first token.
        """
        if not prompt:
            raise ValueError("--prompt is empty, but an autoregressive model has no row that predicts token 0.")
        new: list[int] = []
        last_V = model.append(prompt)
        while True:
            token = int(self.choose(last_V[None])[0])
            if token == eod:
                return Generated(new, len(new) + 1)
            new.append(token)
            if len(new) == max_new_tokens:
                return Generated(new, len(new))
            last_V = model.append([token])
