# SPDX-License-Identifier: Apache-2.0
"""The class that quantised tensors would have."""


class QuantizedTensor:
    """There are none."""
