# SPDX-License-Identifier: Apache-2.0
"""How much a block-diffusion training step has to compute, and how evenly ranks share it. Pure: no torch, no Megatron.

Counted are the multiplications and additions of matrix products in the forward and the backward pass: three times 2mnk
for a product in a linear layer, or for the scores and the weighted values of one query-key pair. That is Megatron's
convention too. Forward passes repeated by recomputation and the scores repeated by the flash backward are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_csbp.transformer.geometry.layer_plans import rank_rows
from megatron_csbp.transformer.geometry.plan import plan_attention
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Sharding
from megatron_csbp.transformer.geometry.visibility import Mask, allowed_pairs


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


def training_flops(shape: ModelShape, sample: Sample, masks: Sequence[Mask], loss_rows: int) -> int:
    """Return the operations of one training step of one sample, whatever the scheme.

    The rows of all copies pass the layers, attention computes the pairs that each layer's mask allows, and logits are
    computed for the rows that carry loss. The clean rows that pure BP computes on every rank count once: repeating
    them is no useful work.

    Args:
        shape: sizes of the model.
        sample: geometry of the sample.
        masks: mask of each layer, or one for all.
        loss_rows: rows of all copies that carry loss.
    """
    rows = sample.length + int(sample.active_blocks.sum()) * sample.block_size
    layers = masks if len(masks) > 1 else list(masks) * shape.num_layers
    assert len(layers) == shape.num_layers, "one mask for each layer, or one for all"
    pairs = sum(list(layers).count(mask) * allowed_pairs(sample, mask) for mask in set(layers))
    linear = shape.num_layers * rows * shape.layer_flops_per_row
    return linear + pairs * shape.attention_flops_per_pair + loss_rows * shape.logit_flops_per_row


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


def attention_work(sample: Sample, sharding: Sharding, mask: Mask) -> Work:
    """Return what each rank of a context group computes in one attention layer, from the ranks' own plans.

    Args:
        sample: geometry of the sample.
        sharding: how it is spread.
        mask: of the layer.
    """
    plans = (plan_attention(rank_rows(sample, sharding, rank), mask) for rank in range(sharding.group_size))
    return Work(tuple(plan.num_pairs for plan in plans), allowed_pairs(sample, mask))


def assignment_speedup(sample: Sample, sharding: Sharding, mask: Mask) -> float:
    """Return the busiest rank's pairs under `contiguous` over those under `dual-end`: modelled, not measured."""
    contiguous, dual_end = (
        max(attention_work(sample, replace(sharding, assignment=assignment), mask).pairs)
        for assignment in (BlockAssignment.CONTIGUOUS, BlockAssignment.DUAL_END)
    )
    return contiguous / dual_end
