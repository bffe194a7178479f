# SPDX-License-Identifier: Apache-2.0
"""Nothing of Megatron's arguments is changed in silence: a change is recorded with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One Megatron argument that was changed, for the start summary.

    Attributes:
        name: attribute of the argument namespace.
        before: the user's value.
        after: the value in force.
        reason: why.
    """

    name: str
    before: object
    after: object
    reason: str
