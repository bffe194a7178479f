# SPDX-License-Identifier: Apache-2.0
"""Compares what a table expects with what is there, and says all differences at once."""

from collections.abc import Collection, Mapping

from megatron_csbp.weights.layouts import Shape

_SHOWN = 8


def check_tensors(expected: Mapping[str, Shape], found: Mapping[str, Shape], where: str, why: str) -> None:
    """Check that exactly the expected tensors are there, with their shapes.

    Args:
        expected: shapes by name.
        found: shapes by name.
        where: what holds the tensors.
        why: what the expectation follows from.

    Raises:
        ValueError: lists tensors that are missing, unexpected, or of another shape.
    """
    problems = [
        _listed("missing", [name for name in expected if name not in found]),
        _listed("unexpected", [name for name in found if name not in expected]),
        _listed(
            "of another shape",
            [
                f"{name} is {list(found[name])} and should be {list(shape)}"
                for name, shape in expected.items()
                if name in found and tuple(found[name]) != tuple(shape)
            ],
        ),
    ]
    problems = [problem for problem in problems if problem]
    if problems:
        raise ValueError(f"{where} does not fit {why}: " + "; ".join(problems) + ".")


def _listed(what: str, names: Collection[str]) -> str:
    shown = [*names][:_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{len(names)} {what} ({', '.join(shown)}{more})" if names else ""
