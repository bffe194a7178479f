# SPDX-License-Identifier: Apache-2.0
"""Weights between Hugging Face safetensors and Megatron's `torch_dist` checkpoints, both ways from one table.

`python -m megatron_csbp.weights import|export|check`. Tables: `families` (tensors) and `model_arguments`
(configuration). Both directions stream: about one layer and one tensor are in memory, whatever the model's size.
"""
