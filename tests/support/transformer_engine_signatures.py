# SPDX-License-Identifier: Apache-2.0
"""Parameters of the Transformer Engine functions that the adapter calls, from its releases (2.20 is 2.20.2)."""

_FORWARD_2_9 = (
    "is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, "
    "fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
    "page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0, "
    "fast_zero_fill=True, qkv_layout='sbh3d', attn_bias_type='no_bias', attn_mask_type='padding', "
    "softmax_type='vanilla', window_size=(-1, -1), rng_gen=None, softmax_offset=None, return_max_logit=False"
)
_BACKWARD_2_9 = (
    "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, "
    "aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
    "s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, "
    "fast_zero_fill=True, qkv_layout='sbh3d', attn_bias_type='no_bias', attn_mask_type='padding', "
    "softmax_type='vanilla', window_size=(-1, -1), deterministic=False"
)
_PARAMS_2_9 = (
    "qkv_type qkv_dtype qkv_layout batch_size num_heads num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk "
    "head_dim_v attn_mask_type window_size alibi_slopes_shape core_attention_bias_type "
    "core_attention_bias_shape core_attention_bias_requires_grad pad_between_seqs attention_dropout "
    "context_parallel cp_comm_type deterministic is_training fp8 fp8_meta inference_params softmax_type "
    "return_max_logit"
)
_FORWARD_2_12 = (
    "is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, "
    "fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
    "page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0, "
    "fast_zero_fill=True, qkv_layout='sbh3d', attn_bias_type='no_bias', attn_mask_type='padding', "
    "softmax_type='vanilla', window_size=(-1, -1), bottom_right_diagonal=None, rng_gen=None, "
    "softmax_offset=None, return_max_logit=False, cuda_graph=False"
)
_BACKWARD_2_12 = (
    "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, "
    "aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
    "s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, "
    "fast_zero_fill=True, qkv_layout='sbh3d', attn_bias_type='no_bias', attn_mask_type='padding', "
    "softmax_type='vanilla', window_size=(-1, -1), bottom_right_diagonal=None, deterministic=False, "
    "cuda_graph=False"
)
_PARAMS_2_12 = (
    "qkv_type qkv_dtype qkv_layout batch_size num_heads num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk "
    "head_dim_v attn_mask_type window_size bottom_right_diagonal alibi_slopes_shape core_attention_bias_type "
    "core_attention_bias_shape core_attention_bias_requires_grad pad_between_seqs attention_dropout "
    "context_parallel cp_comm_type deterministic is_training fp8 fp8_meta inference_params softmax_type "
    "return_max_logit cuda_graph num_splits"
)
_FORWARD_2_15 = (
    "is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, "
    "fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
    "page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0, "
    "fast_zero_fill=True, qkv_layout='sbh3d', o_format='sbhd', qkv_scale_inv_format=None, "
    "attn_bias_type='no_bias', attn_mask_type='padding', softmax_type='vanilla', window_size=(-1, -1), "
    "bottom_right_diagonal=None, rng_gen=None, softmax_offset=None, return_max_logit=False, cuda_graph=False"
)
_BACKWARD_2_15 = (
    "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors, "
    "fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, s_quantizer=None, "
    "dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, "
    "qkv_layout='sbh3d', o_format='sbhd', do_format='sbhd', dqkv_layout='sbh3d', qkv_scale_inv_format=None, "
    "do_scale_inv_format=None, attn_bias_type='no_bias', attn_mask_type='padding', softmax_type='vanilla', "
    "window_size=(-1, -1), bottom_right_diagonal=None, deterministic=False, cuda_graph=False"
)
_PARAMS_2_15 = (
    "qkv_type qkv_dtype qkv_layout batch_size num_heads num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk "
    "head_dim_v attn_mask_type window_size bottom_right_diagonal alibi_slopes_shape core_attention_bias_type "
    "core_attention_bias_shape core_attention_bias_requires_grad pad_between_seqs attention_dropout "
    "context_parallel cp_comm_type cp_size deterministic is_training fp8 fp8_meta inference_params "
    "softmax_type return_max_logit cuda_graph num_splits"
)
_PARAMS_2_18 = (
    "qkv_type qkv_dtype qkv_layout batch_size num_heads num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk "
    "head_dim_v attn_mask_type window_size bottom_right_diagonal alibi_slopes_shape core_attention_bias_type "
    "core_attention_bias_shape core_attention_bias_requires_grad pad_between_seqs attention_dropout "
    "context_parallel cp_comm_type cp_size deterministic is_training fp8 fp8_meta inference_params "
    "softmax_type return_max_logit cuda_graph num_splits fp8_output checkpoint_core_attention has_score_mod "
    "has_score_mod_bprop"
)
_PARAMS_2_20 = (
    "qkv_type qkv_dtype nominal_dtype qkv_layout batch_size num_heads num_gqa_groups max_seqlen_q "
    "max_seqlen_kv num_tokens_q num_tokens_kv head_dim_qk head_dim_v attn_mask_type window_size "
    "bottom_right_diagonal softcap alibi_slopes_shape core_attention_bias_type core_attention_bias_shape "
    "core_attention_bias_requires_grad pad_between_seqs attention_dropout context_parallel cp_comm_type "
    "cp_size cp_size_a2a deterministic is_training fp8 fp8_meta inference_params softmax_type return_max_logit "
    "cuda_graph num_splits softmax_scale fp8_output checkpoint_core_attention has_score_mod "
    "has_score_mod_bprop"
)

# Version: parameters of fused_attn_fwd and of fused_attn_bwd, fields of AttentionParams.
SIGNATURES = {
    "2.9": (_FORWARD_2_9, _BACKWARD_2_9, _PARAMS_2_9),
    "2.12": (_FORWARD_2_12, _BACKWARD_2_12, _PARAMS_2_12),
    "2.14": (_FORWARD_2_12, _BACKWARD_2_12, _PARAMS_2_12),
    "2.15": (_FORWARD_2_15, _BACKWARD_2_15, _PARAMS_2_15),
    "2.18": (_FORWARD_2_15, _BACKWARD_2_15, _PARAMS_2_18),
    "2.20": (_FORWARD_2_15, _BACKWARD_2_15, _PARAMS_2_20),
}
