# SPDX-License-Identifier: Apache-2.0
"""The core attention that Megatron's layers call, in place of its own.

Shapes: S local rows, B micro-batch, N query heads, K key/value heads on this tensor-parallel rank, D head dim.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_csbp.transformer.attention_plan import AttentionPlan, CleanAttention
from megatron_csbp.transformer.communication import ContextGroupExchange
from megatron_csbp.transformer.corrupted_rows import corrupted_rows
from megatron_csbp.transformer.csbp_attention import AttentionContext, block_diffusion_attention
from megatron_csbp.transformer.kernels import HeadShape, checked_kernel
from megatron_csbp.transformer.layout import BlockAssignment, Scheme, SequenceLayout
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger
from megatron_csbp.transformer.wait_clock import WaitClock

GRAD_REDUCE_DTYPES = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}
"""What the values of `--csbp-grad-reduce-dtype` mean."""


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionSettings:
    """What every layer of a block-diffusion model knows; equal on all ranks.

    Attributes:
        sequence_length: L, clean tokens in a sample.
        block_size: M, tokens in a diffusion block.
        scheme: how a sequence is spread over the context group.
        assignment: which chunks a rank owns.
        clean_attention: mask of the clean copy.
        backend: value of `--csbp-attention-backend`.
        num_head_groups: groups in which heads are exchanged and computed.
        grad_reduce_dtype: dtype in which key and value gradients cross a link; None for that of the keys.
        last_layer_drops_clean_rows: whether clean rows end at their keys and values in the last layer, in training.
        delta_net_backend: value of `--csbp-delta-net-backend`.
        delta_net_state_bytes: bound on the states that a delta-net layer has alive at a time.
    """

    sequence_length: int
    block_size: int
    scheme: Scheme
    assignment: BlockAssignment
    clean_attention: CleanAttention
    backend: str = "auto"
    num_head_groups: int = 1
    grad_reduce_dtype: torch.dtype | None = None
    last_layer_drops_clean_rows: bool = False
    delta_net_backend: str = "auto"
    delta_net_state_bytes: int = 256 * 2**20

    def layout(self, group_size: int, rank: int) -> SequenceLayout:
        """Return the rows of one rank of a context group."""
        return SequenceLayout(
            sequence_length=self.sequence_length,
            block_size=self.block_size,
            group_size=group_size,
            rank=rank,
            scheme=self.scheme,
            assignment=self.assignment,
        )


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
    def plan(self) -> AttentionPlan:
        """What this rank computes and exchanges in the layer."""
        layout = self._settings.layout(self._group.size(), self._group.rank())
        return AttentionPlan(layout, self._settings.clean_attention)

    @cached_property
    def _plan_without_clean_queries(self) -> AttentionPlan:
        return replace(self.plan, clean_queries=False)

    @cached_property
    def _exchange(self) -> ContextGroupExchange | None:
        return ContextGroupExchange(self._group) if self.plan.exchanged_streams else None

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
            packed_seq_params: must be None.

        Returns:
            Context rows [S, B, N*D]: of all rows, or only of the corrupted ones (see the constructor).

        Raises:
            ValueError: a mask, a bias or packed sequences are given, or the rows are not those of the layout.
        """
        for name, value in (
            ("mask", attention_mask),
            ("bias", attention_bias),
            ("packed sequences", packed_seq_params),
        ):
            if value is not None:
                raise ValueError(f"block-diffusion attention takes no attention {name}; its plan says who sees whom.")
        if query_SBND.shape[0] != self.plan.layout.num_rows:
            raise ValueError(
                f"block-diffusion attention got {query_SBND.shape[0]} rows; --seq-length and --diffusion-block-size "
                f"give this rank {self.plan.layout.num_rows}."
            )
        drops_clean_rows = self._drops_clean_rows and self.training
        context = AttentionContext(
            plan=self._plan_without_clean_queries if drops_clean_rows else self.plan,
            kernel=checked_kernel(
                self._settings.backend,
                query_SBND.device,
                query_SBND.dtype,
                HeadShape(query_SBND.shape[2], key_SBKD.shape[2], query_SBND.shape[3]),
                self.config.attention_backend.name,
            ),
            scale=self._softmax_scale,
            exchange=self._exchange,
            num_head_groups=self._settings.num_head_groups,
            grad_payload_dtype=self._settings.grad_reduce_dtype,
        )
        out_SBND = block_diffusion_attention(query_SBND, key_SBKD, value_SBKD, context)
        if drops_clean_rows:
            out_SBND = corrupted_rows(out_SBND, self.plan.layout)
        return out_SBND.flatten(2)
