# SPDX-License-Identifier: Apache-2.0
"""An existing Megatron job as one of block diffusion: `python -m megatron_csbp.migrate`; see docs/migrate.md."""
