# SPDX-License-Identifier: Apache-2.0
"""What Megatron's layers use of Transformer Engine, on a CPU: same constructors, parameters, state and arithmetic.

For tests of whole models with `--transformer-impl transformer_engine` where the package cannot run. Its folder goes on
PYTHONPATH before Megatron is imported. Nothing here is faster, fused or quantised.
"""

from transformer_engine import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
