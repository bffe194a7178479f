# SPDX-License-Identifier: Apache-2.0
"""What every scheme of a measurement runs: the same transformer layers around the real attention, on one rank's rows.

The layers are plain PyTorch, not Megatron's, so that a step holds nothing that the schemes share but do not need:
no embedding, no vocabulary, no optimizer, no reduction of weight gradients (it is the same in every scheme).

Shapes: S local rows, B micro-batch (1), N query heads, K key/value heads, D head dim, H hidden, L clean length.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import KeyValueExchange
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask
from megatron_csbp.transformer.kernels import select_kernel

SEED = 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the layers. The ratios are Nemotron's: four query heads a key/value head, MLP 3.5 times as wide."""

    num_layers: int = 2
    hidden: int = 256
    num_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    ffn: int = 896
    block_size: int = 32
    clean_attention: CleanAttention = CleanAttention.BLOCK_CAUSAL

    @property
    def itemsize(self) -> int:
        """Bytes of one element: everything here is fp32."""
        return 4


@dataclass(frozen=True)
class Variant:
    """One line of a comparison.

    Attributes:
        name: for tables.
        scheme: how a sequence is spread.
        assignment: which chunks a rank owns.
        num_head_groups: groups of heads that are exchanged and computed one after the other.
    """

    name: str
    scheme: Scheme
    assignment: BlockAssignment = BlockAssignment.DUAL_END
    num_head_groups: int = 1


HEAD_GROUPS = 2
"""As many as there are key/value heads: both schemes then hide the most."""
CP = Variant("CP", Scheme.CONTEXT_PARALLEL, num_head_groups=HEAD_GROUPS)
BP = Variant("BP", Scheme.BLOCK_PARALLEL)
CSBP = Variant("CSBP", Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, num_head_groups=HEAD_GROUPS)
CSBP_CONTIGUOUS = replace(CSBP, name="CSBP, contiguous", assignment=BlockAssignment.CONTIGUOUS)
CP_AT_ONCE = replace(CP, name="CP, heads at once", num_head_groups=1)
CSBP_AT_ONCE = replace(CSBP, name="CSBP, heads at once", num_head_groups=1)


def make_plan(variant: Variant, shape: Shape, sequence_length: int, group_size: int, rank: int) -> AttentionPlan:
    """Return a rank's plan for one variant."""
    sharding = Sharding(group_size, variant.scheme, variant.assignment)
    return layer_plans(Sample(sequence_length, shape.block_size), sharding, rank).plan(Mask(shape.clean_attention))


def make_context(plan: AttentionPlan, shape: Shape, exchange: KeyValueExchange, variant: Variant) -> AttentionContext:
    """Return what the attention needs besides tensors.

    Args:
        plan: the rank's plan for the variant.
        shape: sizes of the layers.
        exchange: the network.
        variant: line of the comparison.
    """
    return AttentionContext(
        plan,
        select_kernel("auto", torch.device("cpu")),
        shape.head_dim**-0.5,
        exchange if plan.exchanges else None,
        num_head_groups=variant.num_head_groups if plan.exchanges else 1,
    )


class Checksums(NamedTuple):
    """One rank's shares of numbers that add up to the same in every scheme, to show that all do the same work."""

    loss: float
    gradients: float


class Layer(nn.Module):
    """One pre-norm transformer layer: RMSNorm, attention with RoPE, RMSNorm, SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        """Make the weights; they depend on torch's seed alone."""
        super().__init__()
        self._shape = shape
        inner = shape.num_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.query_key_value = nn.Linear(shape.hidden, inner + 2 * keys, bias=False)
        self.out = nn.Linear(inner, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, hidden_SBH: Tensor, rotary: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
        """Return the layer's output rows, [S, B, H]."""
        shape = self._shape
        heads = [shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads]
        projected_SBND = self.query_key_value(self.attention_norm(hidden_SBH)).unflatten(-1, (-1, shape.head_dim))
        query_SBND, key_SBKD, value_SBKD = projected_SBND.split(heads, dim=2)
        attended_SBND = block_diffusion_attention(
            _rotate(query_SBND, rotary), _rotate(key_SBKD, rotary), value_SBKD, context
        )
        hidden_SBH = hidden_SBH + self.out(attended_SBND.flatten(2))
        gate_SBF, up_SBF = self.gate_up(self.mlp_norm(hidden_SBH)).chunk(2, dim=-1)
        hidden_SBH = hidden_SBH + self.down(F.silu(gate_SBF) * up_SBF)
        return hidden_SBH


class Stack:
    """The layers, and one rank's rows of the same made-up sequence for every scheme."""

    def __init__(self, shape: Shape, sequence_length: int) -> None:
        """Make equal weights and an equal sequence on every rank."""
        torch.manual_seed(SEED)
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self._copies_LH = [torch.randn(sequence_length, shape.hidden) for _ in ("clean", "corrupted")]
        self._direction_H = torch.randn(shape.hidden)

    def step(self, context: AttentionContext) -> Tensor:
        """Run one forward and backward pass over this rank's rows, and return its share of the loss."""
        rows = context.plan.rows
        positions_S = torch.from_numpy(rows.positions)
        is_corrupted_S = torch.from_numpy(rows.is_corrupted)
        clean_LH, corrupted_LH = self._copies_LH
        rows_SH = torch.where(is_corrupted_S[:, None], corrupted_LH[positions_S], clean_LH[positions_S])
        hidden_SBH, rotary = rows_SH[:, None], rotary_tables(positions_S, self.shape.head_dim)
        for layer in self.layers:
            hidden_SBH = layer(hidden_SBH, rotary, context)
        loss = ((hidden_SBH[:, 0] @ self._direction_H) * torch.from_numpy(rows.is_counted)).sum()
        self.layers.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        return loss.detach()

    def checksums(self, loss: Tensor) -> Checksums:
        """Return this rank's shares of the checksums after a step.

        Args:
            loss: what the step returned.
        """
        generator = torch.Generator().manual_seed(SEED)
        gradients = 0.0
        for parameter in self.layers.parameters():
            assert parameter.grad is not None
            # A product with fixed numbers is linear, so that ranks' shares add up.
            gradients += float((parameter.grad * torch.randn(parameter.shape, generator=generator)).sum())
        return Checksums(float(loss), gradients)


def rotary_tables(positions_S: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [S, 1, 1, D/2] of RoPE; both copies of a position have the same."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = positions_S[:, None, None, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(tensor_SBND: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = tensor_SBND.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
