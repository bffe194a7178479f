# SPDX-License-Identifier: Apache-2.0
"""Where the facts of several ranks differ, in words. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence

type Facts = Mapping[str, str]
"""What a rank knows, by name; a value is as it is shown."""

_MOST_FIELDS = 8
_MOST_RANKS = 8
_MOST_LETTERS = 160
_ABSENT = "absent"


def digest(facts: Facts) -> str:
    """Return a short text that is equal for equal facts, and for no others."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def differences(facts: Sequence[Facts], hosts: Sequence[str]) -> list[str]:
    """Say in which fields ranks differ.

    Args:
        facts: of each rank.
        hosts: the machine of each rank.

    Returns:
        One line a field, "--lr is 0.001 on ranks 0-6 and 0.002 on rank 7 (node3)": the value that most ranks have
        comes first.
    """
    fields = dict.fromkeys(name for of_rank in facts for name in of_rank)
    lines = []
    for field in fields:
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            ranks_of.setdefault(of_rank.get(field, _ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            by_number = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
            values = [f"{_shortened(value)} on {ranks_in_words(ranks, hosts)}" for value, ranks in by_number]
            lines.append(f"{field} is {' and '.join(values)}")
    return lines


def disagreement(facts: Sequence[Facts], hosts: Sequence[str]) -> str:
    """Return one line that names the differing fields, their values and the ranks."""
    lines = differences(facts, hosts)
    shown = "; ".join(lines[:_MOST_FIELDS])
    more = f"; and {len(lines) - _MOST_FIELDS} more field(s)" if len(lines) > _MOST_FIELDS else ""
    return (
        f"the ranks of this job do not agree: {shown}{more}. Start all of them with the same command, environment, "
        "installation and files."
    )


def ranks_in_words(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return "rank 3 (node1)" or "ranks 0-5, 7 (node0, node1)".

    Args:
        ranks: ascending.
        hosts: the machine of every rank of the job; left out where there is one.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_MOST_RANKS]]
    text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{', ...' if len(runs) > _MOST_RANKS else ''}"
    if len(set(hosts)) < 2:
        return text
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{text} ({', '.join(names[:_MOST_RANKS])}{', ...' if len(names) > _MOST_RANKS else ''})"


def _shortened(value: str) -> str:
    return value if len(value) <= _MOST_LETTERS else f"{value[:_MOST_LETTERS]}..."
