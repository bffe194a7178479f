# SPDX-License-Identifier: Apache-2.0
"""Megatron's gated delta net layer, under block diffusion.

Shapes: S local rows, B micro-batch, F features of the input projection on this tensor-parallel rank, X channels of
queries, keys and values together, H value heads, V value dim.
"""

from functools import cached_property
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor

from megatron_csbp import megatron_delta_net
from megatron_csbp.transformer.core_attention import BlockDiffusionSettings
from megatron_csbp.transformer.delta_net.convolution import ShortConvolution
from megatron_csbp.transformer.delta_net.delta_rule import DeltaHeads, DeltaNetContext, block_diffusion_delta_rule
from megatron_csbp.transformer.delta_net.exchange import ContextGroupChunkExchange
from megatron_csbp.transformer.delta_net.from_rows import plan_from_rows
from megatron_csbp.transformer.delta_net.heads_exchange import HeadsExchange
from megatron_csbp.transformer.delta_net.kernels import select_delta_kernel
from megatron_csbp.transformer.delta_net.plan import DeltaNetPlan
from megatron_csbp.transformer.delta_net.rows import state_dtype
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes, layer_volumes
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.sample_params import plans_of
from megatron_csbp.transformer.traffic_ledger import LayerLedger, TrafficLedger, Volumes
from megatron_csbp.transformer.wait_clock import WaitClock


class BlockDiffusionGatedDeltaNet(GatedDeltaNet):
    """A gated delta net whose corrupted blocks start from the clean state before them.

    Parameters, checkpoint keys and constructor are those of Megatron's `GatedDeltaNet`, plus `settings`. Megatron's
    own layer would run one recurrence over all rows of both copies.
    """

    def __init__(self, *args: Any, settings: BlockDiffusionSettings, **kwargs: Any) -> None:
        """Build the layer.

        Args:
            *args: as for `GatedDeltaNet`.
            settings: what every layer of a block-diffusion model knows.
            **kwargs: as for `GatedDeltaNet`.

        Raises:
            ValueError: heads or activation that the layer does not have, or no kernel for this device.
        """
        self._settings = settings
        with megatron_delta_net.gated_delta_net_without_fla():
            super().__init__(*args, **kwargs)
        if self.act_fn is not torch.nn.functional.silu:
            raise ValueError(
                f"gated delta net layers have SiLU, not {self.activation}; add --swiglu (they take the model's)."
            )

        if self.tp_size > 1 and not self.config.sequence_parallel:
            # Each tensor-parallel rank norms its own heads by the same weight. With sequence parallelism Megatron adds
            # the ranks' gradients, and without it those of query and key norms only.
            for parameter in self.out_norm.parameters():
                parameter.register_hook(self._add_over_heads)

    def _add_over_heads(self, grad: Tensor) -> Tensor:
        """Add up the gradient of a parameter that all tensor-parallel ranks hold."""
        total = grad.clone()
        torch.distributed.all_reduce(total, group=self.pg_collection.tp)
        return total

    def _setup_variant_attrs(self) -> None:
        """See `GatedDeltaNet`; the kernel is this package's choice."""
        super()._setup_variant_attrs()
        device = torch.empty(0, device=torch.cuda.current_device()).device
        self.gated_delta_rule = select_delta_kernel(
            self._settings.delta_net_backend, device, self.config.deterministic_mode
        )

    def rows(self, plans: LayerPlans | None = None) -> RankRows:
        """Return the rows of this rank, for the sample that `plans` belong to."""
        plans = self._settings.plans(self.pg_collection.cp.rank()) if plans is None else plans
        return plans.rows

    def plan(self, plans: LayerPlans | None = None) -> DeltaNetPlan:
        """Return what this rank computes: of its own rows, or in the CP baseline of all rows with some of the heads.

        Raises:
            ValueError: the CP baseline, for a sample with a geometry of its own.
        """
        rows = self.rows(plans)
        if self._by_heads is None:
            return plan_from_rows(rows)
        if not rows.sample.is_static:
            raise ValueError(
                "--context-scheme cp with gated delta nets takes samples of one document with all blocks active, "
                "since its all-to-all takes equally many rows from every rank; use --bp-size for CSBP."
            )
        return self._by_heads.plan

    @cached_property
    def _by_heads(self) -> HeadsExchange | None:
        if self._settings.sharding.scheme is not Scheme.CONTEXT_PARALLEL:
            return None
        return HeadsExchange(self.pg_collection.cp, self.rows(), self.in_proj_split_sections)

    @cached_property
    def _exchange(self) -> ContextGroupChunkExchange | None:
        exchanges = self._settings.sharding.scheme is Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL
        return ContextGroupChunkExchange(self.pg_collection.cp) if exchanges else None

    def observe(self, ledger: TrafficLedger | None, clock: WaitClock | None) -> None:
        """Enter every exchange of this layer in a ledger, and time its waits; None turns either off.

        Args:
            ledger: shared by the layers of a rank.
            clock: shared by the layers of a rank.
        """
        for exchange in (self._exchange, self._by_heads):
            if exchange is not None:
                exchange.ledger = None if ledger is None else LayerLedger(ledger, self.layer_number)
        if self._exchange is not None:
            self._exchange.clock = clock

    def expected_volumes(self, rows: RankRows, micro_batch_size: int, *, training: bool, recomputed: bool) -> Volumes:
        """Return the closed form of what the layer exchanges for one micro-batch.

        Args:
            rows: this rank's, of the micro-batch's samples.
            micro_batch_size: sequences.
            training: whether a backward pass follows.
            recomputed: whether the forward pass is repeated in it.
        """
        dtype = self.config.params_dtype
        sizes = DeltaNetSizes(
            key_heads=self.num_k_heads_local_tp,
            value_heads=self.num_v_heads_local_tp,
            key_dim=self.key_head_dim,
            value_dim=self.value_head_dim,
            look_back=self.conv_kernel_dim - 1,
            row_itemsize=dtype.itemsize,
            state_itemsize=state_dtype(dtype).itemsize,
        )
        return layer_volumes(
            self.layer_number, rows, sizes, micro_batch_size, training=training, recomputed=recomputed
        )

    @property
    def heads(self) -> DeltaHeads:
        """Heads that this rank computes."""
        shares = 1 if self._by_heads is None else self.cp_size
        return DeltaHeads(
            key_heads=self.num_k_heads_local_tp // shares,
            value_heads=self.num_v_heads_local_tp // shares,
            key_dim=self.key_head_dim,
            value_dim=self.value_head_dim,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer on this rank's rows of both copies.

        Args:
            hidden_states: [S, B, hidden size]; with sequence parallelism this tensor-parallel rank's part of S.
            attention_mask: ignored: the plan says what is seen.
            inference_context: must be None.
            packed_seq_params: the plans of a sample with a geometry of its own (`sample_params`), or None.
            *args: ignored, as by Megatron's layer.
            **kwargs: ignored, as by Megatron's layer.

        Returns:
            The output, of the shape of the input, and the bias that is still to be added, if any.

        Raises:
            ValueError: inference, packed sequences of Megatron's own, or rows that are not those of the plan.
        """
        if inference_context is not None:
            raise ValueError("a gated delta net under block diffusion takes no inference context.")
        plan = self.plan(plans_of(packed_seq_params))
        features_SBF, _ = self.in_proj(hidden_states)
        convolution_weights = (self.conv1d.weight, self.conv1d.bias)
        gate_weights = (self.A_log, self.dt_bias)
        if self._by_heads is not None:
            features_SBF = self._by_heads.all_rows(features_SBF)
            convolution_weights = self._by_heads.share_of_channels(convolution_weights, self._qkv_sections)
            gate_weights = self._by_heads.share_of_heads(gate_weights)
        out_SBX = self._mix(features_SBF, plan, convolution_weights, gate_weights)
        if self._by_heads is not None:
            out_SBX = self._by_heads.own_rows(out_SBX)
        out, bias = self.out_proj(out_SBX)
        return out, bias

    @property
    def _qkv_sections(self) -> list[int]:
        return [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]

    def _mix(
        self,
        features_SBF: Tensor,
        plan: DeltaNetPlan,
        convolution_weights: tuple[Tensor, Tensor | None],
        gate_weights: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return what the output projection takes, [S, B, H V]."""
        heads = self.heads
        widths = [
            2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim,
            heads.value_heads * heads.value_dim,
            heads.value_heads,
            heads.value_heads,
        ]
        qkv_SBX, gate_SBX, beta_SBH, alpha_SBH = torch.split(features_SBF, widths, -1)
        weight, bias = convolution_weights
        out_SBHV = block_diffusion_delta_rule(
            qkv_SBX,
            log_decay(alpha_SBH, *gate_weights),
            beta_SBH.sigmoid(),
            ShortConvolution(weight.squeeze(1), bias),
            heads,
            DeltaNetContext(plan, self.gated_delta_rule, self._exchange, self._settings.delta_net_state_bytes),
        )
        return self._gated(out_SBHV, gate_SBX)

    def _gated(self, out_SBHV: Tensor, gate_SBX: Tensor) -> Tensor:
        """Normalise each head and gate it, as Megatron's `_apply_gated_norm` does; [S, B, H V]."""
        normed = self.out_norm(out_SBHV.reshape(-1, out_SBHV.shape[-1])).view_as(out_SBHV)
        gate = torch.nn.functional.silu(gate_SBX.to(state_dtype(gate_SBX.dtype)))
        gated: Tensor = (normed.flatten(-2) * gate).to(out_SBHV.dtype)
        return gated


def log_decay(alpha_SBH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor) -> Tensor:
    """Return the logarithm of the decay, in fp32 or better, also where the parameters are in bf16.

    Args:
        alpha_SBH: a feature of the row.
        a_log_H: logarithm of each head's rate.
        dt_bias_H: bias of each head.
    """
    dtype = state_dtype(alpha_SBH.dtype)
    steps = torch.nn.functional.softplus(alpha_SBH.to(dtype) + dt_bias_H.to(dtype))
    return -a_log_H.to(dtype).exp() * steps
