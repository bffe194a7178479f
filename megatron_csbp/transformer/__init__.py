# SPDX-License-Identifier: Apache-2.0
"""Layout, attention plan, communication, kernels and core attention of context-sharded block parallelism."""
