# SPDX-License-Identifier: Apache-2.0
"""Fused routing of experts, which nothing calls without --moe-router-fusion."""

fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = None
