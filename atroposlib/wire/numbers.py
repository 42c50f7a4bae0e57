"""Numbers that SDK, rollout service and trainer share: their bounds, scores of any number type, and
the rule that a boolean is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, FiniteFloat, ValidationInfo, field_validator

LEAST_INTEGER, LARGEST_INTEGER = -(2**63), 2**64 - 1
"""Integers outside of 64 bits are not exact for every JSON reader, and some readers refuse the
whole document."""
LARGEST_SCORE = 1e9
"""Largest magnitude of a score or an advantage. Sums over a batch of 2**20 sequences and squares of
those sums stay far below the largest float32, and so do gradients that are proportional to an
advantage."""
LEAST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""Between these magnitudes a number is neither 0 nor infinite in float32."""

SafeInt = Annotated[int, Field(ge=-(2**53) + 1, le=2**53 - 1)]
"""An integer that every JSON reader keeps exactly."""
Version = Annotated[int, Field(ge=0, le=2**53 - 1)]

# The first wrong value ends the reading: a million wrong values would otherwise become a million
# error records.
Ints = Annotated[list[int], Field(fail_fast=True)]
Floats = Annotated[list[FiniteFloat], Field(fail_fast=True)]
IntRows = Annotated[list[Ints], Field(fail_fast=True)]
FloatRows = Annotated[list[Floats], Field(fail_fast=True)]
Versions = Annotated[list[Version], Field(fail_fast=True)]
VersionSpan = Annotated[list[Version], Field(min_length=2, max_length=2)]
VersionSpans = Annotated[list[VersionSpan], Field(fail_fast=True)]


def first_beyond(row: Sequence[float], bound: float) -> int | None:
    """Return the index of the first number that is NaN or whose magnitude exceeds `bound`; None if
    there is none.
    """
    try:
        if not row or (-bound <= min(row) and max(row) <= bound and sum(row) == sum(row)):
            return None
    except OverflowError:  # the sum has integers beyond float64
        pass
    return next((index for index, value in enumerate(row) if not -bound <= value <= bound), None)


def path_beyond(values: Sequence[Any], bound: float) -> list[int] | None:
    """Return the indices that lead to the first number that `first_beyond` finds, in lists of any
    depth.

    Raises:
        TypeError: the depth differs, or something is not a number.
    """
    flat = values  # looking at all numbers at once is several times as fast
    while flat and isinstance(flat[0], list | tuple):
        flat = list(chain.from_iterable(flat))
    index = first_beyond(flat, bound)
    if index is None:
        return None
    if flat is values:
        return [index]
    for index, row in enumerate(values):
        if (inner := path_beyond(row, bound)) is not None:
            return [index, *inner]
    return None


def unstorable(value: Any) -> str | None:
    """Say why a JSON document cannot hold `value` for every reader; None if it can.

    Looks at integers and floats alone.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and not LEAST_INTEGER <= value <= LARGEST_INTEGER:
        return f"an integer must lie between {LEAST_INTEGER} and {LARGEST_INTEGER} (64 bits)"
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return "every number must be finite"
    return None


class StrictNumbers(BaseModel):
    """Refuse `true`, `yes` and `on` for a number, in files, flags, request bodies and Python alike."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        refuse_boolean(cls.model_fields[str(info.field_name)].annotation, value)
        return value


def refuse_boolean(annotation: Any, value: Any) -> None:
    """Refuse `true`, `yes` and `on` where a number is wanted; Python and pydantic take them as 1.

    Args:
        annotation: type of a pydantic field.
        value: what the user gave for it. Lists and tables are checked with their entries.

    Raises:
        ValueError: a boolean stands for a number.
    """
    kinds = _kinds(annotation)
    if isinstance(value, bool):
        if {int, float} & set(kinds) and not {bool, Any, object} & set(kinds):
            raise ValueError(
                "a boolean is not a number (YAML reads yes, no, on and off as booleans); give the number"
            )
        return
    for kind in kinds:
        parts = [part for part in get_args(kind) if part is not Ellipsis]
        if not parts or get_origin(kind) is Literal:
            continue
        if isinstance(value, list | tuple | set):
            for entry in value:
                refuse_boolean(parts[0], entry)
        elif isinstance(value, dict):
            for entry in value.values():
                refuse_boolean(parts[-1], entry)


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union, without Annotated's metadata."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]


SCORE_TOLERANCE = 1e-6
"""Scores of a group count as equal if they differ by at most this share of the largest magnitude,
or of 1 if that is larger. Sums of float32 rewards differ by a few 1e-7 although they mean the same.
"""


def scores_equal(scores: Iterable[float]) -> bool:
    """Return True if the scores of a group differ by no more than rounding. A group of none or one is
    equal.

    >>> scores_equal([1.0, 1.0000001]), scores_equal([1.0, 1.001]), scores_equal([0.1 + 0.2 - 0.3, 0.0])
    (True, False, True)
    """
    values = [float(score) for score in scores]
    if not values:
        return True
    largest, smallest = max(values), min(values)
    if not math.isfinite(largest - smallest):
        return largest == smallest
    return largest - smallest <= SCORE_TOLERANCE * max(1.0, abs(largest), abs(smallest))


def plain_numbers(value: Any) -> Any:
    """Return numbers, arrays and nested lists of them as Python's own numbers and lists.

    NumPy's, PyTorch's and JAX's scalars and arrays are converted by their `tolist`, so none of
    these packages is imported. Decimal and Fraction become floats, or NaN if float cannot hold
    them. Everything else is returned unchanged.
    """
    if isinstance(value, str | bytes | bool | int) or type(value) is float or value is None:
        return value
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= {int, float}:
            return value
        return [plain_numbers(entry) for entry in value]
    if callable(tolist := getattr(value, "tolist", None)):
        plain = tolist()
        # NumPy returns a longdouble as itself.
        return float(plain) if type(plain) is type(value) else plain_numbers(plain)
    if isinstance(value, Decimal | Fraction | float):
        try:
            return float(value)
        except (OverflowError, ValueError):  # beyond float's range, or a signaling NaN
            return math.nan
    return value


def plain_score(value: Any) -> Any:
    """Return one score as a float if it is a number of any type, or an array with one entry; else
    unchanged.

    >>> plain_score(True), plain_score("1")
    (1.0, '1')
    """
    plain = plain_numbers(value)
    while isinstance(plain, list | tuple) and len(plain) == 1:
        plain = plain[0]
    try:
        return float(plain) if isinstance(plain, int | float) else plain
    except OverflowError:
        return plain  # an integer beyond float's range: the check of the group's shape names it
