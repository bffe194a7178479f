# SPDX-License-Identifier: Apache-2.0
"""How much a block-diffusion training step has to compute, and how evenly ranks share it. Pure: no torch, no Megatron.

Counted are the multiplications and additions of matrix products in the forward and the backward pass: three times 2mnk
for a product in a linear layer, or for the scores and the weighted values of one query-key pair. That is Megatron's
convention too. Forward passes repeated by recomputation and the scores repeated by the flash backward are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention, allowed_pairs
from megatron_csbp.transformer.layout import BlockAssignment, SequenceLayout


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder.

    Attributes:
        num_layers: decoder layers.
        hidden_size: H.
        ffn_hidden_size: width of the MLP.
        num_query_heads: N.
        num_key_value_heads: K.
        head_dim: D.
        vocab_size: V, padded.
        gated: whether the MLP has a gate (SwiGLU), a third matrix.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_query_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    gated: bool = True

    @property
    def layer_flops_per_row(self) -> int:
        """Operations of the linear layers of one decoder layer for one row."""
        query, key_value = self.num_query_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size
        return 6 * (attention + mlp)

    @property
    def logit_flops_per_row(self) -> int:
        """Operations of the output layer for one row."""
        return 6 * self.hidden_size * self.vocab_size

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations of one layer's attention for one query-key pair, all heads."""
        return 12 * self.num_query_heads * self.head_dim


def training_flops(
    shape: ModelShape, sequence_length: int, block_size: int, clean_attention: CleanAttention, loss_rows: int
) -> int:
    """Return the operations of one training step of one sequence, whatever the scheme.

    Both copies' 2L rows pass the layers, attention computes the pairs that the mask allows, and logits are computed
    for the rows that carry loss. The clean rows that pure BP computes on every rank count once: repeating them is no
    useful work.

    Args:
        shape: sizes of the model.
        sequence_length: L, clean tokens.
        block_size: M.
        clean_attention: mask of the clean copy.
        loss_rows: rows of both copies that carry loss.
    """
    pairs = allowed_pairs(sequence_length, block_size, clean_attention)
    layer = 2 * sequence_length * shape.layer_flops_per_row + pairs * shape.attention_flops_per_pair
    return shape.num_layers * layer + loss_rows * shape.logit_flops_per_row


@dataclass(frozen=True)
class Work:
    """Query-key pairs of one attention layer, for one head of one sequence.

    Attributes:
        pairs: pairs that each rank of the context group computes.
        allowed: pairs that the whole mask allows.
    """

    pairs: tuple[int, ...]
    allowed: int

    @property
    def executed_ratio(self) -> float:
        """Pairs computed over pairs allowed, all ranks together: 1 if nothing is wasted and nothing done twice."""
        return sum(self.pairs) / self.allowed

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over that of the least busy one: 1 if even. The step waits for the busiest."""
        return max(self.pairs) / min(self.pairs)


def attention_work(layout: SequenceLayout, clean_attention: CleanAttention) -> Work:
    """Return what each rank of a context group computes in one attention layer, from the ranks' own plans.

    Args:
        layout: any rank's layout.
        clean_attention: mask of the clean copy.
    """
    plans = (AttentionPlan(replace(layout, rank=rank), clean_attention) for rank in range(layout.group_size))
    allowed = allowed_pairs(layout.sequence_length, layout.block_size, clean_attention)
    return Work(tuple(plan.num_pairs for plan in plans), allowed)


def assignment_speedup(layout: SequenceLayout, clean_attention: CleanAttention) -> float:
    """Return the busiest rank's pairs under `contiguous` over those under `dual-end`: modelled, not measured."""
    busiest: Sequence[int] = [
        max(attention_work(replace(layout, assignment=assignment), clean_attention).pairs)
        for assignment in (BlockAssignment.CONTIGUOUS, BlockAssignment.DUAL_END)
    ]
    return busiest[0] / busiest[1]
