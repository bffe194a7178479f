# SPDX-License-Identifier: Apache-2.0
"""Data: noise, the dual-end sampler, datasets, validation and preparation."""
