# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_csbp.tools.gpu_check`: what only a GPU can tell, in one run without a second rank."""
