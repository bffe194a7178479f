# SPDX-License-Identifier: Apache-2.0
"""Is this machine, this cluster, this job sound? `python -m megatron_csbp.doctor`; see docs/cluster.md."""
