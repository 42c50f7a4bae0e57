"""Scores as environments and reward functions give them: of any number type, and equal up to
rounding.
"""

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

SCORE_TOLERANCE = 1e-6
"""Scores of a group count as equal if they differ by at most this share of the largest magnitude,
or of 1 if that is larger. Sums of float32 rewards differ by a few 1e-7 although they mean the same.
"""


def scores_equal(scores: Iterable[float]) -> bool:
    """Whether the scores of a group differ by no more than rounding. A group of none or one is
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
