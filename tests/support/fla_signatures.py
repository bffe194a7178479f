# SPDX-License-Identifier: Apache-2.0
"""Signatures of fla's gated delta rule, as `inspect` shows them, and a stand-in that computes it on a CPU."""

import torch
from torch import Tensor

from megatron_csbp.transformer.delta_net.rows import DeltaRows
from megatron_csbp.transformer.delta_net.torch_kernel import TorchDeltaRule

COMMON = (
    "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu cp_context"
)
PARAMETERS = {
    "0.4.2": f"{COMMON} transpose_state_layout",
    "0.5.2": f"{COMMON} use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first",
    "0.6.0": f"{COMMON} use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first chunk_indices",
}
"""Named parameters of `fla.ops.gated_delta_rule.chunk_gated_delta_rule` by version of fla-core; each takes **kwargs
as well, which it ignores."""


def stand_in(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """What fla computes: whole sequences [B, T, H, ...], states [B, H, K, V], and no state in between."""
    assert output_final_state
    assert all(tensor.is_contiguous() for tensor in (q, k, v, g, beta, initial_state))
    assert q.shape == k.shape
    assert g.shape == beta.shape == q.shape[:3]
    assert initial_state.shape == (q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    assert scale == k.shape[3] ** -0.5
    length = q.shape[1]
    out, _, last = TorchDeltaRule().clean(DeltaRows(q, k, v, g, beta), initial_state, length, [[True]] * q.shape[0])
    assert torch.isfinite(out).all()
    return out, last
