# SPDX-License-Identifier: Apache-2.0
"""Time of a gated delta net's recurrence on a CPU: both copies of a sequence, against Megatron's own of one.

    python -m benchmarks.delta_net [--seq-length 4096] [--block-size 256 32] [--repeats 7]

One side is what a layer under block diffusion does between its projections on one rank: convolution, unit length,
rule, for the clean rows and for the corrupted blocks. The other is what Megatron's layer does there for the clean rows
alone, with its PyTorch form of the rule. Both run on one thread, by turns; the figures are the least processor time of
all repeats, which other work on the machine disturbs least.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule
from torch import Tensor

from megatron_csbp.transformer.delta_net.convolution import ShortConvolution
from megatron_csbp.transformer.delta_net.delta_rule import DeltaHeads, DeltaNetContext, block_diffusion_delta_rule
from megatron_csbp.transformer.delta_net.from_rows import plan_from_rows
from megatron_csbp.transformer.delta_net.torch_kernel import TorchDeltaRule
from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding

HEADS = DeltaHeads(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
"""A twelfth of the value heads of Qwen3.5-27B, of the same dims."""
TAPS = 4


@dataclass(frozen=True)
class Times:
    """Least processor seconds of a forward pass, and of a forward and a backward pass."""

    forward: float
    both: float


def inputs(rows: int) -> list[Tensor]:
    """Return queries, keys and values before the convolution, logarithms of decays, strengths, and the taps."""
    generator = torch.Generator().manual_seed(0)
    channels = 2 * HEADS.key_heads * HEADS.key_dim + HEADS.value_heads * HEADS.value_dim
    qkv = torch.randn(rows, 1, channels, generator=generator)
    gates = torch.rand(2, rows, 1, HEADS.value_heads, generator=generator)
    taps = torch.randn(channels, TAPS, generator=generator)
    return [tensor.requires_grad_() for tensor in (qkv, (-gates[0]).clone(), gates[1].clone(), taps)]


def block_diffusion(length: int, block_size: int, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return this package's pass over both copies, with the inputs of so many rows."""
    plan = plan_from_rows(rank_rows(Sample(length, block_size), Sharding(1, Scheme.SINGLE), 0))
    context = DeltaNetContext(plan, TorchDeltaRule())
    qkv, log_decay, beta, taps = tensors
    return lambda: block_diffusion_delta_rule(qkv, log_decay, beta, ShortConvolution(taps), HEADS, context)


def stock(tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return Megatron's pass over the clean copy, as `GatedDeltaNet.forward` with `--deterministic-mode`."""
    qkv_SBX, log_decay_SBH, beta_SBH, taps_XR = tensors
    width = HEADS.key_heads * HEADS.key_dim

    def run() -> Tensor:
        rows_BXS = F.pad(qkv_SBX.permute(1, 2, 0), (TAPS - 1, 0))
        convolved = F.silu(F.conv1d(rows_BXS, taps_XR[:, None], groups=taps_XR.shape[0])).transpose(1, 2)
        query, key, value = convolved.split([width, width, HEADS.value_heads * HEADS.value_dim], -1)
        query, key = (F.normalize(t.unflatten(-1, (HEADS.key_heads, HEADS.key_dim)), dim=-1) for t in (query, key))
        repeats = HEADS.value_heads // HEADS.key_heads
        out, _ = torch_chunk_gated_delta_rule(
            query.repeat_interleave(repeats, dim=2),
            key.repeat_interleave(repeats, dim=2),
            value.unflatten(-1, (HEADS.value_heads, HEADS.value_dim)),
            log_decay_SBH.transpose(0, 1),
            beta_SBH.transpose(0, 1),
        )
        return out

    return run


def measure(passes: Sequence[Callable[[], Tensor]], repeats: int) -> list[Times]:
    """Time passes by turns."""
    forward, both = [[float("inf")] * len(passes) for _ in range(2)]
    for _ in range(repeats):
        for number, run in enumerate(passes):
            started = time.process_time()
            out = run()
            middle = time.process_time()
            out.square().sum().backward()
            ended = time.process_time()
            forward[number] = min(forward[number], middle - started)
            both[number] = min(both[number], ended - started)
    return [Times(*times) for times in zip(forward, both, strict=True)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_net", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seq-length", type=int, default=4096, help="clean rows")
    parser.add_argument("--block-size", type=int, nargs="+", default=[256, 32], help="of the corrupted blocks")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    length, both_copies = options.seq_length, inputs(2 * options.seq_length)
    ours = [block_diffusion(length, block_size, both_copies) for block_size in options.block_size]
    reference, *times = measure([stock(inputs(length)), *ours], options.repeats)
    print(
        f"| L = {options.seq_length}, fp32, one thread, least of {options.repeats} | forward | forward and backward |"
    )
    print("|---|---:|---:|")
    print(f"| Megatron's own, clean copy | {reference.forward:.3f} s | {reference.both:.3f} s |")
    for block_size, found in zip(options.block_size, times, strict=True):
        forward, both = found.forward / reference.forward, found.both / reference.both
        print(
            f"| both copies, blocks of {block_size} | {found.forward:.3f} s, {forward:.2f} times | "
            f"{found.both:.3f} s, {both:.2f} times |"
        )


if __name__ == "__main__":
    main()
