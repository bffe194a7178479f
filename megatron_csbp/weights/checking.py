# SPDX-License-Identifier: Apache-2.0
"""Compares the logits of a Hugging Face model with those of a Megatron checkpoint.

Shapes: B prompts, S tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_csbp import cpu_runtime
from megatron_csbp.weights.check_hugging_face import Computed, hugging_face_logits
from megatron_csbp.weights.check_megatron import megatron_logits
from megatron_csbp.weights.exporting import changed_config
from megatron_csbp.weights.importing import Source, open_source
from megatron_csbp.weights.side_files import has_tokenizer
from megatron_csbp.weights.trained_checkpoint import open_checkpoint

_PROMPTS = ("The capital of France is Paris, and the capital of Italy is", "def add(a, b):\n    return a +")
_RANDOM_SHAPE = (2, 24)


@dataclass(frozen=True)
class Outcome:
    """What a comparison found.

    Attributes:
        equal: whether the logits differ by no more than the tolerance.
        largest: the largest difference.
        lines: the report.
    """

    equal: bool
    largest: float
    lines: list[str]


def check_weights(
    source_folder: Path, load: Path, iteration: int | None, prompts: Sequence[str] | None, tolerance: float
) -> Outcome:
    """Compute logits on both sides, on the CPU in fp32, layer by layer.

    Args:
        source_folder: the Hugging Face model.
        load: the checkpoint folder.
        iteration: which checkpoint; the latest by default.
        prompts: texts; by default two short ones, or random tokens where there is no tokenizer.
        tolerance: allowed difference, relative to the largest logit, or to 1 if that is less.

    Raises:
        ValueError: one of them cannot be used, or they are not of the same model.
    """
    source = open_source(source_folder, vocab_divisible_by=1)
    cpu_runtime.install("cpu")  # before anything imports Megatron
    checkpoint = open_checkpoint(load, iteration)
    saved = vars(checkpoint.arguments)
    changed = changed_config(source.family, source.config, saved, f"--load {load}", f"--from {source_folder}")
    if changed:
        raise ValueError(
            f"--load {load} was trained with other positions than --from {source_folder}: {', '.join(changed)}. "
            "Export it, "
            "and check against that."
        )
    arguments = source.arguments | {"padded_vocab_size": saved["padded_vocab_size"]}
    tokens_BS, lengths, what = _tokens(source, prompts)
    theirs = hugging_face_logits(source, tokens_BS)
    ours = megatron_logits(checkpoint.path, arguments, tokens_BS)
    return _compare(theirs, ours, lengths, what, tolerance)


def _tokens(source: Source, prompts: Sequence[str] | None) -> tuple[Tensor, list[int], str]:
    """Return token ids, filled up on the right, how many of each row count, and what they are."""
    if not has_tokenizer(source.folder):
        if prompts:
            raise ValueError(f"--prompt: {source.folder} has no tokenizer; leave it out to compare on random tokens.")
        generator = torch.Generator().manual_seed(0)
        tokens_BS = torch.randint(source.shape.dims["vocab"], _RANDOM_SHAPE, generator=generator)
        return tokens_BS, [_RANDOM_SHAPE[1]] * _RANDOM_SHAPE[0], "sequences of random tokens (there is no tokenizer)"
    from megatron_csbp.data.text_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(source.folder))
    rows = [torch.tensor(tokenizer.encode(text)) for text in prompts or _PROMPTS]
    empty = [text for text, row in zip(prompts or _PROMPTS, rows, strict=True) if not len(row)]
    if empty:
        raise ValueError(f"--prompt {empty[0]!r} has no tokens; give a text.")
    # What follows a prompt changes nothing in it: attention is causal.
    tokens_BS = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens_BS, [len(row) for row in rows], "prompts"


def _compare(theirs: Computed, ours: Computed, lengths: list[int], what: str, tolerance: float) -> Outcome:
    """Report differences by prompt, and the first layer where the hidden states part if the logits do."""
    vocab = theirs.logits_BSV.shape[-1]
    lines, largest, allowed = [], 0.0, tolerance
    for row, length in enumerate(lengths):
        expected_SV = theirs.logits_BSV[row, :length]
        found_SV = ours.logits_BSV[row, :length, :vocab]
        difference = (found_SV - expected_SV).abs().max().item()
        agree = (found_SV.argmax(-1) == expected_SV.argmax(-1)).float().mean().item()
        top = expected_SV.abs().max().item()
        largest, allowed = max(largest, difference), max(allowed, tolerance * top)
        lines.append(
            f"{row + 1}: {length} tokens, largest difference {difference:.3g} (largest logit {top:.3g}), same next "
            "token "
            f"at {agree:.0%} of positions"
        )
    # A NaN is no equality.
    equal = largest <= allowed and all(bool(each.logits_BSV.isfinite().all()) for each in (theirs, ours))
    verdict = "equal" if equal else "DIFFERENT"
    lines = [f"compared {len(lengths)} {what}", *lines]
    if not equal:
        lines.append(_where(theirs, ours, tolerance))
    lines.append(f"{verdict}: largest difference of logits {largest:.3g}, allowed {allowed:.3g}")
    return Outcome(equal, largest, lines)


def _where(theirs: Computed, ours: Computed, tolerance: float) -> str:
    for layer in sorted(theirs.hidden_BSH):
        expected_BSH, found_BSH = theirs.hidden_BSH[layer], ours.hidden_BSH[layer]
        difference = (found_BSH - expected_BSH).abs().max().item()
        if not difference <= tolerance * max(1.0, expected_BSH.abs().max().item()):
            return f"hidden states part in layer {layer}, by {difference:.3g}"
    return "hidden states of all layers are equal: the final norm or the output layer differs"
