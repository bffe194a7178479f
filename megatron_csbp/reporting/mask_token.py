# SPDX-License-Identifier: Apache-2.0
"""What the start summary says of `--mask-token-id`: which token it is."""

from argparse import Namespace

from megatron_csbp import megatron_start
from megatron_csbp.configuration.mask_token_rules import good_mask_token


def mask_token_lines(args: Namespace) -> list[str]:
    """Return a line that names the token, and a warning if it stands for ordinary text.

    That the training data do not hold it is checked before.

    Args:
        args: Megatron's validated arguments; the tokenizer is built.
    """
    token = megatron_start.token_of(args.mask_token_id)
    lines = [f"  mask token {args.mask_token_id}: {token.said}"]
    if token.is_text:
        advice = good_mask_token(args.mask_token_id, *megatron_start.mask_tokens(args.padded_vocab_size))
        lines.append(
            f"  WARNING: --mask-token-id {args.mask_token_id}: it stands for ordinary text, so the model cannot tell "
            f"a corrupted token from a clean one where a text holds it. Use {advice}."
        )
    return lines
