# SPDX-License-Identifier: Apache-2.0
"""Context-sharded block parallelism (arXiv 2609.19242) for block-diffusion language models on Megatron-Core."""

__version__ = "0.1.0"
