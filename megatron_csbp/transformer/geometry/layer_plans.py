# SPDX-License-Identifier: Apache-2.0
"""The plans of one rank for one sample: one for full layers, and one for layers with a window. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_csbp.transformer.geometry.ownership import balanced_owners
from megatron_csbp.transformer.geometry.plan import AttentionPlan, plan_attention
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import Mask

type PlanKey = tuple[Mask, bool]
"""A mask, and whether clean rows attend."""

_MOST_SAMPLES = 64


@dataclass(frozen=True, eq=False)
class LayerPlans:
    """The rows of one rank for one sample, and its plans by mask; a plan is made when it is first asked for.

    Attributes:
        rows: the rank's rows.
    """

    rows: RankRows
    _plans: dict[PlanKey, AttentionPlan] = field(default_factory=dict)

    def plan(self, mask: Mask, *, clean_queries: bool = True) -> AttentionPlan:
        """Return the plan of layers with this mask."""
        key = (mask, clean_queries)
        if key not in self._plans:
            self._plans[key] = plan_attention(self.rows, mask, clean_queries=clean_queries)
        return self._plans[key]

    def prepare(self, keys: Iterable[PlanKey]) -> "LayerPlans":
        """Make plans now, in a data worker, so that the training thread finds them."""
        for mask, clean_queries in keys:
            self.plan(mask, clean_queries=clean_queries)
        return self


def rank_rows(sample: Sample, sharding: Sharding, rank: int) -> RankRows:
    """Return the rows of one rank.

    Where not all blocks are active, they are spread evenly, except under the CP baseline, on one rank, and where the
    model wants them with the owner of their chunk.
    """
    stays = sharding.keeps_blocks_home or sharding.scheme in (Scheme.SINGLE, Scheme.CONTEXT_PARALLEL)
    spreads = sample.active is not None and not stays
    return RankRows(sample, sharding, rank, balanced_owners(sample, sharding) if spreads else None)


def layer_plans(sample: Sample, sharding: Sharding, rank: int) -> LayerPlans:
    """Return the plans of one rank for one sample; equal samples share them."""
    return _layer_plans(_ByContent(sample), sharding, rank)


@dataclass(frozen=True, eq=False)
class _ByContent:
    """A sample that equals another of the same content."""

    sample: Sample

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByContent) and self.sample.key == other.sample.key

    def __hash__(self) -> int:
        return hash(self.sample.key)


@lru_cache(maxsize=_MOST_SAMPLES)
def _layer_plans(content: _ByContent, sharding: Sharding, rank: int) -> LayerPlans:
    return LayerPlans(rank_rows(content.sample, sharding, rank))
