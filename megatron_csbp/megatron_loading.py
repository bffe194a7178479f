# SPDX-License-Identifier: Apache-2.0
"""Arguments and weights of a checkpoint for commands that do not train: a part of `megatron_compat`.

Its symbols are in `required_symbols.REQUIRED_SYMBOLS`. Nothing here imports Megatron until it is called.
"""

import contextlib
import functools
import importlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def saved_arguments(path: Path) -> Namespace | None:
    """The arguments in the `torch_dist` checkpoint of a folder (`iter_...` or `release`); None if there are none."""
    dist_checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        return None
    args: Namespace | None = dist_checkpointing.load_common_state_dict(str(path)).get("args")
    return args


def initialize_megatron() -> None:
    """Makes process groups and random states, after Megatron's arguments have become the global ones."""
    importlib.import_module("megatron.training.initialize").initialize_megatron()


def load_weights(model: Any) -> None:
    """Loads what the global `--load` names into a (wrapped) model, and neither optimizer nor random state."""
    importlib.import_module("megatron.training.checkpointing").load_checkpoint([model], None, None)


def unwrapped(model: Any) -> Any:
    """The GPT model under Megatron's wrappers."""
    return importlib.import_module("megatron.core.utils").unwrap_model(model)


def tokenizer() -> Any:
    """Megatron's tokenizer."""
    return importlib.import_module("megatron.training.global_vars").get_tokenizer()


@contextlib.contextmanager
def recorded_evaluations() -> Iterator[list[dict[str, Any]]]:
    """Yields a list that gets an entry for every evaluation that Megatron does: `losses` by name, and `samples`.

    Megatron prints them with seven digits; only the last rank has the sums.
    """
    training: Any = importlib.import_module("megatron.training.training")
    get_args = importlib.import_module("megatron.training.global_vars").get_args
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
