"""The verdict about a program, from outside the sandbox: only this side knows the right values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atroposlib.sandbox.contract import Outcome, Raised, Returned

Kind = Literal["right", "wrong", "crash", "timeout", "contained"]

TOLERANCE = 1e-6
"""Relative, and absolute near 0, by which a number that is expected as a float may differ."""


REFUSED = ("PermissionError: [Errno 1] ", "OSError: [Errno 12] ", "MemoryError")
"""Beginnings of the errors that a program meets where the sandbox refuses something: EPERM, ENOMEM,
and no more addresses. A program may raise them without cause. That changes the name of its failure,
and never a failure into a success."""


@dataclass(frozen=True)
class Verdict:
    """What a program is worth.

    Attributes:
        kind: `right` if every call returned what was expected. Otherwise `timeout` (no time left),
            `contained` (ended by another limit, by an error with which the sandbox refuses a call,
            or processes of it had to be killed), `crash` (it does not compile, raised, or died), or
            `wrong`.
        passed: calls that returned what was expected.
        why: for a person, one line.
    """

    kind: Kind
    passed: int
    why: str


def same_value(expected: Any, got: Any) -> bool:
    """Return whether two values that JSON can hold are equal: types count, but that a whole number may
    stand for a float.

    Tuples are lists here. Floats are equal within TOLERANCE, and NaN equals NaN.
    """
    if (
        isinstance(expected, bool)
        or isinstance(got, bool)
        or expected is None
        or isinstance(expected, str)
    ):
        return type(expected) is type(got) and bool(expected == got)
    if isinstance(expected, float):
        if type(got) not in (int, float):
            return False
        try:
            return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (
                expected != expected and got != got
            )
        except OverflowError:  # a whole number that no float can be
            return False
    if isinstance(expected, int):
        return type(got) is int and expected == got
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(expected) == len(got)
            and all(same_value(one, other) for one, other in zip(expected, got, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and expected.keys() == got.keys()
            and all(same_value(value, got[key]) for key, value in expected.items())
        )
    return False


def verdict(outcome: Outcome, expected: Sequence[Any]) -> Verdict:
    """Judge a program by what its calls returned.

    Args:
        outcome: of running it with one call for each expected value.
        expected: the values, as JSON holds them; the program has never seen them.
    """
    results = outcome.results[: len(expected)]
    same = [
        isinstance(got, Returned) and same_value(value, got.value)
        for value, got in zip(expected, results, strict=False)
    ]
    passed = sum(same)
    if expected and passed == len(expected) and outcome.end == "exited":
        return Verdict("right", passed, f"all {passed} calls returned what was expected")
    if outcome.end in ("deadline", "cpu"):
        return Verdict("timeout", passed, f"it took too long (ended by its {outcome.end} limit)")
    if outcome.end in ("memory", "output"):
        return Verdict("contained", passed, f"ended by its {outcome.end} limit")
    if outcome.left:
        return Verdict("contained", passed, f"{outcome.left} processes of it had to be killed")
    if outcome.problem is not None:
        if outcome.problem.startswith(REFUSED):
            return Verdict("contained", passed, f"refused by the sandbox: {outcome.problem}")
        return Verdict("crash", passed, outcome.problem)
    if outcome.end == "signal":
        return Verdict("crash", passed, f"ended by signal {-outcome.code}")
    for number, (ok, got) in enumerate(zip(same, results, strict=True)):
        if not ok:
            if isinstance(got, Raised) and got.text.startswith(REFUSED):
                return Verdict(
                    "contained", passed, f"refused by the sandbox: call {number} raised {got.text}"
                )
            if isinstance(got, Raised):
                return Verdict("crash", passed, f"call {number} raised {got.text}")
            return Verdict("wrong", passed, f"call {number} returned {got.value!r:.100}")
    return Verdict(
        "crash",
        passed,
        f"it ended with status {outcome.code} after {len(results)} of {len(expected)} calls",
    )
