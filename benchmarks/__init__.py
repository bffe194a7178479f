# SPDX-License-Identifier: Apache-2.0
"""Traffic, memory, useful work and throughput of CP, pure BP and CSBP, measured side by side (`make bench`)."""
