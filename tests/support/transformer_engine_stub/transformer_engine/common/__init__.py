# SPDX-License-Identifier: Apache-2.0
"""See `transformer_engine`."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
