# SPDX-License-Identifier: Apache-2.0
"""Arguments and weights of a checkpoint for commands that do not train: a part of `megatron_compat`.

Its symbols are in `required_symbols.REQUIRED_SYMBOLS`. Nothing here imports Megatron until it is called.
"""

import contextlib
import functools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def saved_arguments(path: Path) -> Namespace | None:
    """The arguments in the `torch_dist` checkpoint of a folder (`iter_...` or `release`); None if there are none."""
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        return None
    args: Namespace | None = dist_checkpointing.load_common_state_dict(str(path)).get("args")
    return args


def initialize_megatron() -> None:
    """Makes process groups and random states, after Megatron's arguments have become the global ones."""
    from megatron.training.initialize import initialize_megatron

    initialize_megatron()


def load_weights(model: Any) -> None:
    """Loads what the global `--load` names into a (wrapped) model, and neither optimizer nor random state."""
    from megatron.training.checkpointing import load_checkpoint

    load_checkpoint([model], None, None)


def unwrapped(model: Any) -> Any:
    """The GPT model under Megatron's wrappers."""
    from megatron.core.utils import unwrap_model

    return unwrap_model(model)


def tokenizer() -> Any:
    """Megatron's tokenizer."""
    from megatron.training.global_vars import get_tokenizer

    return get_tokenizer()


@contextlib.contextmanager
def recorded_evaluations() -> Iterator[list[dict[str, Any]]]:
    """Yields a list that gets an entry for every evaluation that Megatron does: `losses` by name, and `samples`.

    Megatron prints them with seven digits; only the last rank has the sums.
    """
    from megatron.training import training
    from megatron.training.global_vars import get_args

    get_args = get_args
    evaluations: list[dict[str, Any]] = []
    stock = training.evaluate

    @functools.wraps(stock)
    def evaluate(*positional: Any, **keywords: Any) -> Any:
        result = stock(*positional, **keywords)
        losses = {name: float(value) for name, value in (result[0] or {}).items()}
        evaluations.append({"losses": losses, "samples": keywords["eval_iters"] * get_args().eval_global_batch_size})
        return result

    training.evaluate = evaluate
    try:
        yield evaluations
    finally:
        training.evaluate = stock
