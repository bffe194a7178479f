# SPDX-License-Identifier: Apache-2.0
"""What the doctor found: one line each, with a remedy where something is wrong."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

from megatron_csbp.agreement.differences import ranks_in_words


class State(StrEnum):
    """How bad a finding is: `fail` keeps a run from starting or makes it wrong, `warn` makes it slow or fragile."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: how bad it is.
        name: what was looked at.
        detail: what was found.
        fix: what to do; empty where nothing is to be done.
        where: the ranks that found it, where there are several.
    """

    state: State
    name: str
    detail: str
    fix: str = ""
    where: str = ""

    @property
    def lines(self) -> list[str]:
        """The finding as it is printed."""
        where = f" [{self.where}]" if self.where else ""
        first = f"[{self.state}] {self.name}{where}: {self.detail}"
        return [first, f"  fix: {self.fix}"] if self.fix else [first]

    def as_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read what `as_json` gave."""
        return cls(**values | {"state": State(values["state"])})


def ok(name: str, detail: str) -> Finding:
    """Something is as it should be."""
    return Finding(State.OK, name, detail)


def warn(name: str, detail: str, fix: str) -> Finding:
    """A run would start, and be slow or break later."""
    return Finding(State.WARN, name, detail, fix)


def fail(name: str, detail: str, fix: str) -> Finding:
    """A run would not start, or be wrong."""
    return Finding(State.FAIL, name, detail, fix)


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether one of them keeps a run from starting."""
    return any(finding.state is State.FAIL for finding in findings)


def merged(of_ranks: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Say once what several ranks found alike.

    Args:
        of_ranks: the findings of each rank; ranks that did not look have none.
        hosts: the machine of each rank.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(of_ranks):
        for finding in findings:
            ranks_of.setdefault(finding, []).append(rank)
    looked = {name: sum(f.name == name for of_rank in of_ranks for f in of_rank) for name in names(ranks_of)}
    order = {name: place for place, name in enumerate(looked)}
    result = [
        finding if len(ranks) == looked[finding.name] else replace(finding, where=ranks_in_words(ranks, hosts))
        for finding, ranks in ranks_of.items()
    ]
    return sorted(result, key=lambda finding: order[finding.name])


def names(findings: Iterable[Finding]) -> list[str]:
    """Return the names of findings, each once, in their order."""
    return list(dict.fromkeys(finding.name for finding in findings))
