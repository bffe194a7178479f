# SPDX-License-Identifier: Apache-2.0
"""How a block looks while it is uncovered."""

from collections.abc import Callable, Sequence

from megatron_csbp.generation.decoding import BlockStep

MASK_SIGN = "_"


def step_in_words(step: BlockStep, detokenize: Callable[[Sequence[int]], str]) -> str:
    """Return one line: where the block is, how far it is, and its text with a sign for each mask.

    Args:
        step: the block after a pass.
        detokenize: token ids to text.
    """
    text, run = "", []
    for token, masked in zip(step.tokens, step.is_masked, strict=True):
        if not masked:
            run.append(token)
            continue
        text += (detokenize(run) if run else "") + MASK_SIGN
        run = []
    text += detokenize(run) if run else ""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    return f"[{step.first_position}, pass {step.step}, {sum(step.is_masked)} masked] {escaped}"
