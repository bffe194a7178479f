# SPDX-License-Identifier: Apache-2.0
"""FP8, which is never on."""

from contextlib import nullcontext

fp8_autocast = fp8_model_init = nullcontext


class FP8GlobalStateManager:
    """Knows that FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False
