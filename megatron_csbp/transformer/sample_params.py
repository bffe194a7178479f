# SPDX-License-Identifier: Apache-2.0
"""Carries the plans of one sample through Megatron's model call, layer by layer.

Megatron hands `packed_seq_params` of a call to every attention layer, also when a layer runs again for its backward
pass. A subclass in the ordinary `sbhd` format passes untouched, so several micro-batches can be under way, each with a
geometry of its own.
"""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_csbp.transformer.geometry.layer_plans import LayerPlans


@dataclass
class SampleParams(PackedSeqParams):
    """Megatron's parameters of a call, with the plans of the micro-batch's sample.

    Attributes:
        plans: rows and plans of this rank.
    """

    plans: LayerPlans | None = None


def sample_params(plans: LayerPlans) -> SampleParams:
    """Return the parameters of a micro-batch of one sample."""
    rows = plans.rows.num_rows
    return SampleParams(qkv_format="sbhd", max_seqlen_q=rows, max_seqlen_kv=rows, plans=plans)


def plans_of(params: object) -> LayerPlans | None:
    """Return the plans that a call's `packed_seq_params` carry, or None where there are none.

    Raises:
        ValueError: they are Megatron's own, of sequences that are packed without a plan.
    """
    if params is None:
        return None
    if not isinstance(params, SampleParams):
        raise ValueError(
            "block-diffusion attention takes no packed sequences of Megatron's own; documents are in its plan."
        )
    return params.plans
