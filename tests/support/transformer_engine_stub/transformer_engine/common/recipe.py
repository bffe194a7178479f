# SPDX-License-Identifier: Apache-2.0
"""A class that Megatron derives from at import."""


class DelayedScaling:
    """No FP8 here."""
