# SPDX-License-Identifier: Apache-2.0
"""Megatron's tokenizer and random state at the start of a run: the part of `megatron_compat` that set-up needs.

Its symbols are in `required_symbols.REQUIRED_SYMBOLS`. Nothing here imports Megatron until it is called.
"""

import importlib

import torch


def eod_token_id() -> int | None:
    """The id that Megatron's tokenizer ends a document with; None if it has none, or none by that name."""
    tokenizer = importlib.import_module("megatron.training.global_vars").get_tokenizer()
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        return None
    return eod if isinstance(eod, int) else None


def restart_default_generator() -> None:
    """Seeds the default random generators as Megatron did before it warmed its fused functions up.

    Weights outside the tracker of tensor-parallel random states (position embeddings, routers) come from them, and the
    warm-up draws as many numbers as a rank has rows: without this, runs on different numbers of ranks would start
    from different weights.
    """
    global_vars = importlib.import_module("megatron.training.global_vars")
    mpu = importlib.import_module("megatron.core.parallel_state")
    args = global_vars.get_args()
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * mpu.get_data_parallel_rank()
    torch.manual_seed(seed)
