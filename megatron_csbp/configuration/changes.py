# SPDX-License-Identifier: Apache-2.0
"""Nothing of Megatron's arguments is changed in silence: a change is recorded with its reason."""

from argparse import Namespace
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


class Changes:
    """Sets arguments and remembers what changed.

    Attributes:
        made: the changes so far.
    """

    def __init__(self, args: Namespace) -> None:
        self.made: list[Change] = []
        self._args = args

    def set(self, name: str, value: object, reason: str) -> None:
        """Set an argument, and remember it if it had another value."""
        before = getattr(self._args, name)
        if before != value:
            self.made.append(Change(name, before, value, reason))
            setattr(self._args, name, value)
