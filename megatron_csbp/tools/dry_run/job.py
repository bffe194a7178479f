# SPDX-License-Identifier: Apache-2.0
"""A job: a network on a topology with samples of one geometry. Pure: no torch, no Megatron.

Letters: P ranks of the context group, L clean tokens, M block size, V corrupted views.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from megatron_csbp.configuration.performance_arguments import default_chunk_rows
from megatron_csbp.tools.dry_run.network import Layer, Network, Parameters
from megatron_csbp.tools.dry_run.packed import PackedSamples, busiest_rank
from megatron_csbp.tools.dry_run.topology import Layers, Precision, Recompute, Topology
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor
from megatron_csbp.transformer.head_groups import default_head_groups

_NOTHING_AGAIN, _BF16, _FUSED = Recompute(), Precision(), Layers()


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the plan depends on.

    Attributes:
        network: the model.
        topology: who holds what.
        length: L.
        block_size: M.
        views: V; 0 for autoregressive training.
        clean_attention: mask of the clean copy.
        window_anchor: what the window of corrupted rows is counted from.
        micro_batch: samples of a micro-batch.
        global_batch: samples of an iteration.
        iterations: of the run.
        loss_rows: expected rows with loss, of all copies of a sample.
        most_loss_rows: rows that may carry loss, of all copies of a sample.
        excludes_mask: whether the mask token is taken out of the softmax.
        recompute: what runs again.
        precision: bytes of elements.
        layers: how layers are implemented.
        stages: for each pipeline rank its model chunks, each the numbers of its layers; empty: equal parts.
        head_groups: groups of heads that are exchanged one after the other; None: chosen from sizes.
        chunk_rows: rows whose logits exist at a time, 0 for all; None: chosen from sizes.
        drops_clean_rows: whether clean rows end at their keys in the last layer.
        distributed_optimizer: whether ranks share the optimizer's state.
        overlaps_gradients: whether gradients are summed beside the backward pass.
        overlaps_weights: whether weights are gathered beside the forward pass.
        dropout: whether hidden states have dropout.
        state_bytes: bound on the states of a gated delta net that are alive at a time.
        delta_net_kernel: which kernels gated delta nets run on.
        packed: samples that stand for those of packed documents; None: one document, with every block active.
        plans_fullest: of packed documents, whether the fullest sample is planned, not the median one.
        rank: the rank of the context group that is planned; None: the busiest.
    """

    network: Network
    topology: Topology
    length: int
    block_size: int
    views: int = 1
    clean_attention: CleanAttention = CleanAttention.TOKEN_CAUSAL
    window_anchor: WindowAnchor = WindowAnchor.POSITION
    micro_batch: int = 1
    global_batch: int = 1
    iterations: int = 0
    loss_rows: int = 0
    most_loss_rows: int = 0
    excludes_mask: bool = False
    recompute: Recompute = _NOTHING_AGAIN
    precision: Precision = _BF16
    layers: Layers = _FUSED
    stages: tuple[tuple[tuple[int, ...], ...], ...] = ()
    head_groups: int | None = None
    chunk_rows: int | None = None
    drops_clean_rows: bool = False
    distributed_optimizer: bool = True
    overlaps_gradients: bool = True
    overlaps_weights: bool = True
    dropout: bool = False
    state_bytes: int = 256 * 2**20
    delta_net_kernel: Literal["fla", "torch"] = "fla"
    packed: PackedSamples | None = None
    plans_fullest: bool = False
    rank: int | None = None

    @property
    def sample(self) -> Sample:
        """Geometry of the sample that is planned."""
        if self.packed is None:
            return _one_document(self.length, self.block_size, self.views)
        return (self.packed.fullest if self.plans_fullest else self.packed.median).sample

    def of_fullest_sample(self) -> "Job":
        """Return the job with the sample that needs most memory, on the rank that has most of its rows."""
        if self.packed is None:
            return self
        fullest = self.packed.fullest
        rank = busiest_rank(fullest.sample, self.sharding, None) if self.rank is None else self.rank
        return replace(
            self,
            plans_fullest=True,
            loss_rows=fullest.loss_rows,
            most_loss_rows=fullest.most_loss_rows,
            rank=rank,
        )

    @cached_property
    def sharding(self) -> Sharding:
        """How a sample is spread."""
        top = self.topology
        keeps_home = self.network.delta_net is not None
        return Sharding(top.context, top.scheme, top.assignment, keeps_blocks_home=keeps_home)

    @cached_property
    def planned_rank(self) -> int:
        """The rank of the context group that the plan is of, the busiest: of one document the last, or all alike."""
        if self.rank is not None:
            return self.rank
        if self.packed is None:
            return self.topology.context - 1
        attending = next((layer for layer in self.network.layers if layer.attends), None)
        return busiest_rank(self.sample, self.sharding, None if attending is None else self.mask(attending))

    @cached_property
    def rank_rows(self) -> RankRows:
        """Rows of the rank that is planned."""
        return layer_plans(self.sample, self.sharding, self.planned_rank).rows

    @property
    def rows(self) -> int:
        """S: rows of all copies on a rank, for one sample."""
        return self.rank_rows.num_rows

    @property
    def shared_rows(self) -> int:
        """Rows on a rank outside attention and MLP: fewer with sequence parallelism."""
        return self.rows // (self.topology.tensor if self.topology.sequence_parallel else 1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an iteration on one rank."""
        return self.global_batch // (self.micro_batch * self.topology.data)

    def mask(self, layer: Layer) -> Mask:
        """Return the mask of a layer."""
        return Mask(self.clean_attention, layer.window, self.window_anchor)

    def drops_in(self, layer: Layer) -> bool:
        """Return whether clean rows end at their keys in this layer."""
        return self.drops_clean_rows and layer.number == len(self.network.layers)

    def plan(self, layer: Layer, rank: int | None = None) -> AttentionPlan:
        """Return the attention plan of a layer, of the rank that is planned by default."""
        rank = self.planned_rank if rank is None else rank
        plans = layer_plans(self.sample, self.sharding, rank)
        return plans.plan(self.mask(layer), clean_queries=not self.drops_in(layer))

    @cached_property
    def local_key_heads(self) -> int:
        """K on a tensor-parallel rank."""
        return self.network.local_key_heads(self.topology.tensor)

    @property
    def key_row_bytes(self) -> int:
        """Bytes of the keys and values of one row on a rank, all samples of a micro-batch."""
        return row_bytes(self.local_key_heads, self.network.head_dim, self.precision.weights, self.micro_batch)

    @cached_property
    def exchange_groups(self) -> int:
        """Head groups that are exchanged one after the other."""
        if self.head_groups is not None:
            return self.head_groups
        layers = {(layer.kind, layer.window): layer for layer in self.network.layers if layer.attends}
        clean = max((self.plan(layer).clean.buffer_bytes(self.key_row_bytes) for layer in layers.values()), default=0)
        return default_head_groups(self.local_key_heads, clean, recomputes=self.recompute.attention)

    @property
    def loss_chunk(self) -> int:
        """Rows whose logits exist at a time; 0 for all."""
        if self.chunk_rows is not None:
            return self.chunk_rows
        return default_chunk_rows(self.network.vocab // self.topology.tensor)

    @cached_property
    def stage_chunks(self) -> tuple[tuple[tuple[Layer, ...], ...], ...]:
        """The layers of each model chunk of each pipeline rank."""
        top, layers = self.topology, self.network.layers
        numbers = self.stages
        if not numbers:
            each = len(layers) // (top.pipeline * top.virtual)
            numbers = tuple(
                tuple(
                    tuple(range(first := (chunk * top.pipeline + stage) * each + 1, first + each))
                    for chunk in range(top.virtual)
                )
                for stage in range(top.pipeline)
            )
        return tuple(tuple(tuple(layers[n - 1] for n in chunk) for chunk in stage) for stage in numbers)

    def stage_layers(self, stage: int) -> Iterator[tuple[int, Layer]]:
        """Yield (index in its chunk, layer) of the layers of a pipeline rank."""
        for chunk in self.stage_chunks[stage]:
            yield from enumerate(chunk)

    def is_first(self, stage: int) -> bool:
        """Return whether a pipeline rank embeds tokens."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Return whether a pipeline rank computes the loss."""
        return stage == self.topology.pipeline - 1

    def stage_parameters(self, stage: int) -> Parameters:
        """Return the parameters of a rank of a pipeline stage."""
        top, network = self.topology, self.network
        total = Parameters()
        for _, layer in self.stage_layers(stage):
            total += network.layer_parameters(layer, top.tensor, top.expert, top.expert_tensor)
        if self.is_first(stage):
            total += Parameters(network.embedding_parameters(top.tensor))
        if self.is_last(stage):
            own_head = not network.tied or top.pipeline > 1
            norm = network.norm_tensors * network.hidden
            total += Parameters(network.head_parameters(top.tensor) if own_head else norm)
        return total

    def stage_kinds(self) -> dict[str, int]:
        """Return a pipeline rank of each kind, by name: first, middle, last."""
        last = self.topology.pipeline - 1
        if not last:
            return {"every rank": 0}
        middle = {"middle stages": 1} if last > 1 else {}
        return {"first stage": 0, **middle, "last stage": last}

    def with_scheme(self, scheme: Scheme) -> "Job":
        """Return the same job under another scheme, with defaults chosen anew."""
        return replace(self, topology=replace(self.topology, scheme=scheme))


@lru_cache(maxsize=16)
def _one_document(length: int, block_size: int, views: int) -> Sample:
    return Sample(length, block_size, views)
