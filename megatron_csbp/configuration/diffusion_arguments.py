# SPDX-License-Identifier: Apache-2.0
"""Flags that say what is trained: copies and windows, the loss, and what a sample is made of.

Imports nothing of Megatron.
"""

import argparse
from argparse import ArgumentParser

from megatron_csbp.configuration.new_row_rules import METHODS
from megatron_csbp.objectives import OBJECTIVES
from megatron_csbp.objectives.noise_schedules import NOISE_SCHEDULES
from megatron_csbp.transformer.geometry.visibility import CleanAttention, WindowAnchor

type Group = ArgumentParser | argparse._ArgumentGroup


def add_geometry_arguments(group: Group) -> None:
    """Add the copies of a sample, how they are spread, and where windows end."""
    group.add_argument(
        "--context-scheme",
        choices=["cp"],
        default=None,
        help="cp: with --context-parallel-size alone, run the context-parallel baseline, which exchanges corrupted "
        "keys and values as well. It has to be asked for by name, since a forgotten --bp-size would look the same.",
    )
    group.add_argument(
        "--corrupted-views",
        type=int,
        default=None,
        metavar="V",
        help="Corrupted copies of every sample in one step, each with a noise of its own, that share one clean copy: "
        "V+1 rows for each token instead of 2V. Default: 2 for fast-dllm-v2, else 1.",
    )
    group.add_argument(
        "--window-anchor",
        choices=[str(choice) for choice in WindowAnchor],
        default=str(WindowAnchor.POSITION),
        help="What the window of a corrupted row is counted from in layers with --window-size: its own position, as "
        "Megatron's windows are, or its block's first position, as DiffusionGemma's (all rows of a block then see the "
        "same clean tokens).",
    )


def add_objective_arguments(group: Group) -> None:
    """Add what is trained: the loss, the clean mask that goes with it, and the noise."""
    group.add_argument(
        "--diffusion-objective",
        choices=list(OBJECTIVES),
        default="block-diffusion",
        help="block-diffusion: BD3-LM's NELBO, one noise level per block, over supervised tokens. nemotron: NVIDIA's "
        "joint diffusion and autoregressive loss, one noise level per sequence. fast-dllm-v2: the published "
        "conversion of an autoregressive model, two complementary views with shifted targets.",
    )
    group.add_argument(
        "--clean-attention",
        choices=[str(choice) for choice in CleanAttention],
        default=None,
        help="What a clean token sees: earlier clean tokens, or its whole block and earlier blocks. Default: "
        "block-causal for block-diffusion, token-causal for nemotron.",
    )
    group.add_argument(
        "--diffusion-loss-weight",
        type=float,
        default=None,
        help="Weight of the diffusion term. Default: 1.0 for block-diffusion, 0.3 for nemotron.",
    )
    group.add_argument(
        "--ar-loss-weight",
        type=float,
        default=None,
        help="Weight of the next-token term on the clean copy. Default: 0 for block-diffusion, 1.0 for nemotron.",
    )
    group.add_argument(
        "--noise-schedule",
        choices=list(NOISE_SCHEDULES),
        default="log-linear",
        help="Chance that a token is corrupted, and its loss weight, as functions of the noise level t.",
    )
    group.add_argument(
        "--init-mask-token",
        choices=METHODS,
        default=None,
        help="How the mask token's row of embedding and output layer starts in a new run from weights that were not "
        "trained with it (--load with --finetune, --pretrained-checkpoint): as the mean of the trained rows, the mean "
        "with noise of --init-method-std, or as it is in the checkpoint (keep). Default: mean, but keep for a token "
        "of ordinary text. A resumed run never changes it.",
    )
    group.add_argument("--noise-eps", type=float, default=1e-3, help="Smallest noise level: t lies in [eps, 1].")


def add_packing_arguments(group: Group) -> None:
    """Add what a sample is made of where it is not a stretch of one long text."""
    group.add_argument(
        "--pack-documents",
        action="store_true",
        help="Make samples of whole documents (or conversations) of --data-path, each at a block boundary: none sees "
        "another, and positions restart. For fine-tuning. A micro-batch is one sample.",
    )
    group.add_argument(
        "--loss-on",
        choices=["answers", "all"],
        default="answers",
        help="With --pack-documents: train on the tokens that PREFIX.loss.bin marks as answers (on all tokens of a "
        "dataset without that file), or on all.",
    )
    group.add_argument(
        "--long-documents",
        choices=["refuse", "cut"],
        default="refuse",
        help="With --pack-documents: what to do with documents that are longer than --seq-length.",
    )
    group.add_argument(
        "--csbp-all-blocks",
        action="store_true",
        help="With --pack-documents: give every block corrupted rows, also those in which no row carries loss. For "
        "ablation: it changes no loss and no gradient.",
    )
