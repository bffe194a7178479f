# SPDX-License-Identifier: Apache-2.0
"""Which rows of the vocabulary start anew when an autoregressive model becomes a block-diffusion one.

Such a model has never read its mask token: the row of the embedding is whatever its initialisation or its padding was,
often about 0, with which first gradients are large. Imports nothing of Megatron.
"""

from argparse import Namespace
from dataclasses import asdict, dataclass

from megatron_csbp.configuration.checkpoint_folder import checkpoint_to_load
from megatron_csbp.configuration.checkpoint_rules import Start

METHODS = ("mean", "mean-noise", "keep")


@dataclass(frozen=True)
class NewRows:
    """Rows of the embedding, and of an output layer of its own, that start as the mean of the trained ones.

    Attributes:
        mask_token_id: row of the mask token.
        first_added: rows from here on are not in the checkpoint.
        num_trained: rows below, that of the mask token apart, are trained.
        noise_std: standard deviation of noise on the mean; 0 for none.
        seed: of the noise.
        checkpoint: folder of the weights that they belong to.
    """

    mask_token_id: int
    first_added: int
    num_trained: int
    noise_std: float
    seed: int
    checkpoint: str


def choose_new_rows(args: Namespace, start: Start, vocab_size: int, is_text: bool) -> str | None:
    """Decide how the rows start, and keep it as `args.csbp_new_rows`.

    Rows change in the first conversion only: in a new run from weights that were not trained with this mask token.

    Args:
        args: validated arguments of a block-diffusion run; changed in place.
        start: what the run starts from.
        vocab_size: ids that the tokenizer has; rows behind them are padding.
        is_text: whether the mask token stands for ordinary text, so that its row is trained.

    Returns:
        What the start summary says of it; None where there is nothing to say.
    """
    args.csbp_new_rows = None
    method, mask = args.init_mask_token, args.mask_token_id
    if start.checkpoint is None or start.is_resumed:
        return None
    saved = start.saved
    if saved is not None and _was_trained_with(saved, mask):
        return f"the row of mask token {mask} stays: the checkpoint was trained with it"
    if method == "keep":
        return f"the row of mask token {mask} stays (--init-mask-token keep)"
    if method is None and (is_text or saved is None):
        why = "it stands for ordinary text" if is_text else "the checkpoint does not say how it was trained"
        return f"the row of mask token {mask} stays, since {why}; --init-mask-token mean starts it as the mean of all"
    before = getattr(saved, "padded_vocab_size", None) or args.padded_vocab_size
    new = NewRows(
        mask_token_id=mask,
        first_added=before,
        num_trained=min(vocab_size, before),
        noise_std=args.init_method_std if method == "mean-noise" else 0.0,
        seed=args.seed,
        checkpoint=str(start.checkpoint.path),
    )
    args.csbp_new_rows = asdict(new)  # plain values, since checkpoints carry the arguments
    added = f" and rows {before} to {args.padded_vocab_size - 1}" if before < args.padded_vocab_size else ""
    verb = "start" if added else "starts"
    noise = f", with noise of standard deviation {new.noise_std:g}" if new.noise_std else ""
    trained = new.num_trained - (mask < new.num_trained)
    return f"the row of mask token {mask}{added} {verb} as the mean of the {trained} trained rows{noise}"


def new_rows_of_next_load(args: Namespace) -> NewRows | None:
    """Return the rows that start anew when weights are loaded next.

    None also where a run that restarts itself will load a checkpoint of its own, whose mask row is trained.
    """
    if getattr(args, "csbp_new_rows", None) is None:
        return None
    new, checkpoint = NewRows(**args.csbp_new_rows), checkpoint_to_load(args)
    return new if checkpoint is not None and str(checkpoint.path) == new.checkpoint else None


def _was_trained_with(saved: Namespace, mask_token_id: int) -> bool:
    """Whether weights are of a diffusion model with this mask token; an imported one says so by itself."""
    is_run = getattr(saved, "diffusion_block_size", None) is not None
    knows = is_run or getattr(saved, "knows_mask_token", False)
    return knows and getattr(saved, "mask_token_id", mask_token_id) in (None, mask_token_id)
