# SPDX-License-Identifier: Apache-2.0
"""Whole models: who can see whom, and where each row stands in its sequence."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.functional.model_flags import CSBP2, MODEL, TRAINING, words
from tests.support.megatron_run import Ranks
from tests.support.model_probe import Logits, probe

LENGTH, BLOCK = 64, 8
BLOCKS = LENGTH // BLOCK
VOCABULARY = 180
SIZES = [*MODEL, *TRAINING, *words("--num-layers 2 --num-query-groups 2 --micro-batch-size 1 --train-iters 1")]
SCHEMES = {
    "one rank": ([], 1),
    "cp2": (["--context-parallel-size", "2", "--context-scheme", "cp"], 2),
    "pure bp2": (["--bp-size", "2"], 2),
    "csbp2": (CSBP2, 2),
}


def random_tokens(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))


def with_other_blocks(tokens: Tensor) -> Tensor:
    """Return the tokens as they are, and then once for each block with all tokens of that block changed."""
    inputs = tokens.repeat(1 + BLOCKS, 1)
    for block in range(BLOCKS):
        inputs[1 + block, block * BLOCK : (block + 1) * BLOCK] = (
            tokens[0, block * BLOCK : (block + 1) * BLOCK] + 1
        ) % VOCABULARY
    return inputs


def changed_blocks(logits: Tensor) -> list[set[int]]:
    """Return, for each changed block of the input, the blocks of the output that are not equal to the bit."""
    differs = (logits[1:] != logits[0]).any(-1).view(BLOCKS, BLOCKS, BLOCK).any(-1)
    return [set(row.nonzero().view(-1).tolist()) for row in differs]


@pytest.mark.parametrize("clean_attention", ["token-causal", "block-causal"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_leaks(scheme: str, clean_attention: str, ranks: Ranks, tmp_path: Path) -> None:
    flags, world_size = SCHEMES[scheme]
    arguments = [
        *SIZES,
        *flags,
        *words(f"--diffusion-block-size {BLOCK} --mask-token-id 190 --clean-attention {clean_attention}"),
        *words("--global-batch-size 1"),
    ]
    clean, corrupted = random_tokens(1), random_tokens(2)
    same = 1 + BLOCKS
    logits = probe(
        ranks,
        tmp_path,
        arguments,
        torch.cat([clean.repeat(same, 1), with_other_blocks(clean)]),
        torch.cat([with_other_blocks(corrupted), corrupted.repeat(same, 1)]),
        world_size,
    )
    # Another corrupted block: seen by itself alone.
    assert changed_blocks(logits.corrupted[:same]) == [{block} for block in range(BLOCKS)]
    assert changed_blocks(logits.clean[:same]) == [set()] * BLOCKS
    # Another clean block: seen by later corrupted blocks, never by its own, and by itself and later clean blocks.
    assert changed_blocks(logits.corrupted[same:]) == [set(range(block + 1, BLOCKS)) for block in range(BLOCKS)]
    assert changed_blocks(logits.clean[same:]) == [set(range(block, BLOCKS)) for block in range(BLOCKS)]


POSITIONS = {
    "rope": "",
    "partial, interleaved rope": "--rotary-percent 0.5 --rotary-base 500 --rotary-interleaved",
    "scaled, interpolated rope": "--use-rope-scaling --rotary-seq-len-interpolation-factor 4",
    "yarn": (
        "--position-embedding-type yarn --yarn-original-max-position-embeddings 16 --rotary-scaling-factor 4 "
        "--yarn-beta-fast 4 --yarn-beta-slow 1"
    ),
    "learned": "--position-embedding-type learned_absolute",
    "none, query and key norm": "--position-embedding-type none --qk-layernorm",
    "rope, experts": (
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type none"
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_both_copies_stand_at_their_true_positions(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """With one token in a block and the clean tokens in the corrupted copy, both copies are the stock causal model."""
    shape = [*SIZES, *words(POSITIONS[name]), *words("--global-batch-size 1")]
    tokens = random_tokens(3)
    results = {}
    schemes = SCHEMES if name == "rope" else {scheme: SCHEMES[scheme] for scheme in ("pure bp2", "csbp2")}
    for scheme, (flags, world_size) in {"stock": ([], 1), **schemes}.items():
        folder = tmp_path / scheme
        folder.mkdir()
        blocks = [] if scheme == "stock" else words("--diffusion-block-size 1 --mask-token-id 190")
        corrupted = None if scheme == "stock" else tokens
        results[scheme] = probe(ranks, folder, [*shape, *flags, *blocks], tokens, corrupted, world_size)
    expected = results["stock"].clean
    assert expected.std() > 0.1
    for scheme in schemes:
        torch.testing.assert_close(results[scheme].clean, expected, rtol=0, atol=1e-5, msg=f"{scheme}, clean")
        torch.testing.assert_close(results[scheme].corrupted, expected, rtol=0, atol=1e-5, msg=f"{scheme}, corrupted")


def test_queries_are_scaled_by_their_true_position_in_both_copies_under_every_scheme(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A scale that begins at position 16 leaves the blocks before it as they are, and changes all others."""
    shape = [*SIZES, *words(f"--global-batch-size 1 --diffusion-block-size {BLOCK} --mask-token-id 190")]
    scale = words("--query-scale-beta 0.7 --yarn-original-max-position-embeddings 16")
    clean, corrupted = random_tokens(4), random_tokens(5)

    def logits(name: str, flags: list[str], world_size: int) -> Logits:
        folder = tmp_path / name
        folder.mkdir()
        return probe(ranks, folder, [*shape, *flags], clean, corrupted, world_size)

    unscaled = logits("no scale", [], 1)
    scaled = {name: logits(name, [*flags, *scale], size) for name, (flags, size) in SCHEMES.items() if name != "cp2"}
    for copy in ("clean", "corrupted"):
        expected = getattr(scaled["one rank"], copy)
        differs = (expected != getattr(unscaled, copy)).any(-1).view(BLOCKS, BLOCK)
        assert differs.any(1).tolist() == [False, False, *[True] * (BLOCKS - 2)]
        for found in scaled.values():
            torch.testing.assert_close(getattr(found, copy), expected, rtol=0, atol=1e-5)
