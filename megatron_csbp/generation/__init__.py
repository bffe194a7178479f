# SPDX-License-Identifier: Apache-2.0
"""Text from a trained checkpoint, block by block or token by token; entry: `megatron_csbp.generate`."""
