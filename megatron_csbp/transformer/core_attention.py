# SPDX-License-Identifier: Apache-2.0
"""The core attention that Megatron's layers call, in place of its own.

Shapes: S local rows, B micro-batch, N query heads, K key/value heads on this tensor-parallel rank, D head dim.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_csbp import megatron_model
from megatron_csbp.transformer.attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.corrupted_rows import corrupted_rows
from megatron_csbp.transformer.device_arrays import on_device
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, layer_plans
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask, WindowAnchor
from megatron_csbp.transformer.kernels import HeadShape, checked_kernel
from megatron_csbp.transformer.query_scale import QueryScale
from megatron_csbp.transformer.sample_params import plans_of
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger
from megatron_csbp.transformer.wait_clock import WaitClock

GRAD_REDUCE_DTYPES = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}
"""What the values of `--csbp-grad-reduce-dtype` mean."""


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionSettings:
    """What every layer of a block-diffusion model knows; equal on all ranks.

    Attributes:
        sample: the geometry of a sample that carries none of its own.
        sharding: how a sequence is spread over the context group.
        clean_attention: mask of the clean copy.
        window_anchor: what the window of corrupted rows is counted from, in layers that have one.
        backend: value of `--csbp-attention-backend`.
        num_head_groups: groups in which heads are exchanged.
        grad_reduce_dtype: dtype in which key and value gradients cross a link; None: dtype of the keys.
        last_layer_drops_clean_rows: whether clean rows end at their keys and values in the last layer, in training.
        query_scale: scale of queries by position, if the model has one.
        delta_net_backend: value of `--csbp-delta-net-backend`.
        delta_net_state_bytes: bound on the states that a delta-net layer has alive at a time.
    """

    sample: Sample
    sharding: Sharding
    clean_attention: CleanAttention
    window_anchor: WindowAnchor = WindowAnchor.POSITION
    backend: str = "auto"
    num_head_groups: int = 1
    grad_reduce_dtype: torch.dtype | None = None
    last_layer_drops_clean_rows: bool = False
    query_scale: QueryScale | None = None
    delta_net_backend: str = "auto"
    delta_net_state_bytes: int = 256 * 2**20

    def plans(self, rank: int) -> LayerPlans:
        """Return the plans of one rank for a sample that carries none of its own."""
        return layer_plans(self.sample, self.sharding, rank)

    def mask(self, config: TransformerConfig, layer_number: int) -> Mask:
        """Return the mask of a layer, by Megatron's own window flags.

        Args:
            config: Megatron's config.
            layer_number: number of the layer, from 1.
        """
        return Mask(self.clean_attention, megatron_model.layer_window(config, layer_number), self.window_anchor)


class CSBPCoreAttention(MegatronModule):
    """Block-diffusion attention over the context group, as a drop-in for Megatron's core attention.

    Has no parameters and no state, so checkpoints keep the keys of stock Megatron. The constructor and `forward`
    follow `megatron.core.transformer.dot_product_attention.DotProductAttention`, plus `settings`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        settings: BlockDiffusionSettings,
        drops_clean_rows: bool = False,
    ) -> None:
        """See the class. `attn_mask_type` and `cp_comm_type` say nothing here: the attention plan masks and exchanges.

        With `drops_clean_rows` clean rows have no queries in training, and the output is of corrupted rows only.

        Raises:
            ValueError: a request that this attention cannot honour (cross attention, dropout), or no process groups.
        """
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if attention_type != "self" or dropout:
            raise ValueError(
                f"block-diffusion attention does self attention without dropout, not {attention_type}, {dropout}."
            )
        if pg_collection is None:
            raise ValueError("CSBPCoreAttention needs pg_collection with the context group `cp`.")
        self.layer_number = max(1, layer_number)
        self._softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._settings = settings
        self._drops_clean_rows = drops_clean_rows
        self._group = pg_collection.cp

    @cached_property
    def mask(self) -> Mask:
        """The mask of this layer."""
        return self._settings.mask(self.config, self.layer_number)

    def plan(self, plans: LayerPlans | None = None, *, drops_clean_rows: bool = False) -> AttentionPlan:
        """Return what this rank computes and exchanges in the layer, for the sample that `plans` belong to."""
        plans = self._settings.plans(self._group.rank()) if plans is None else plans
        return plans.plan(self.mask, clean_queries=not drops_clean_rows)

    def drops_clean_rows(self) -> bool:
        """Return whether clean rows have no queries in the call that comes."""
        return self._drops_clean_rows and self.training

    @cached_property
    def _exchange(self) -> ContextGroupExchange | None:
        return ContextGroupExchange(self._group) if self._settings.sharding.shares_clean_keys else None

    def observe(self, ledger: TrafficLedger | None, clock: WaitClock | None) -> None:
        """Enter every exchange of this layer in a ledger, and time its waits; None turns either off.

        Args:
            ledger: shared by the layers of a rank.
            clock: shared by the layers of a rank.
        """
        if self._exchange is not None:
            self._exchange.ledger = None if ledger is None else LayerLedger(ledger, self.layer_number)
            self._exchange.clock = clock

    def forward(
        self,
        query_SBND: Tensor,
        key_SBKD: Tensor,
        value_SBKD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend with this rank's rows of both copies.

        Args:
            query_SBND: queries after position embedding, [S, B, N, D].
            key_SBKD: keys, [S, B, K, D].
            value_SBKD: values, [S, B, K, D].
            attention_mask: must be None.
            attn_mask_type: ignored: every layer has the block-diffusion mask.
            attention_bias: must be None.
            packed_seq_params: the plans of a sample with a geometry of its own (`sample_params`), or None.

        Returns:
            Context rows [S, B, N*D]: of all rows, or only of the corrupted ones (see the constructor).

        Raises:
            ValueError: a mask, a bias or packed sequences are given, or the rows are not those of the plan.
        """
        for name, value in (("mask", attention_mask), ("bias", attention_bias)):
            if value is not None:
                raise ValueError(f"block-diffusion attention takes no attention {name}; its plan says who sees whom.")
        drops_clean_rows = self.drops_clean_rows()
        plan = self.plan(plans_of(packed_seq_params), drops_clean_rows=drops_clean_rows)
        if query_SBND.shape[0] != plan.rows.num_rows:
            raise ValueError(
                f"block-diffusion attention got {query_SBND.shape[0]} rows; --seq-length, --diffusion-block-size and "
                f"--corrupted-views give this rank {plan.rows.num_rows}."
            )
        if self._settings.query_scale is not None:
            positions_S = on_device(plan.rows.positions, query_SBND.device)
            query_SBND = self._settings.query_scale(query_SBND, positions_S)
        context = AttentionContext(
            plan=plan,
            kernel=checked_kernel(
                self._settings.backend,
                query_SBND.device,
                query_SBND.dtype,
                HeadShape(query_SBND.shape[2], key_SBKD.shape[2], query_SBND.shape[3]),
                self.config.attention_backend.name,
                plan.rows.static_chunk_length,
            ),
            scale=self._softmax_scale,
            exchange=self._exchange,
            num_head_groups=self._settings.num_head_groups,
            grad_payload_dtype=self._settings.grad_reduce_dtype,
        )
        out_SBND = block_diffusion_attention(query_SBND, key_SBKD, value_SBKD, context)
        if drops_clean_rows:
            out_SBND = corrupted_rows(out_SBND, plan.rows)
        return out_SBND.flatten(2)
