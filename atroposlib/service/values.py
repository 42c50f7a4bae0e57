"""Checks of the values in a posted group: bounds of numbers, depth of free fields, and JSON that trainers can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from atroposlib.service.schemas import InvalidRequestError, invalid, path, short
from atroposlib.wire.number_bounds import first_beyond, unstorable

DEEPEST = 100
"""Levels of lists and objects within a field of free form. The JSON readers of clients stop between 200 and 1,024."""


def check_free(value: Any, where: list[str | int]) -> None:
    """Check a field of free form: integers of 64 bits, finite floats, and at most DEEPEST levels.

    Raises:
        InvalidRequestError: names the place, the value and the bound.
    """
    # Paths cost several times as much as the checks, so they are made only for a value that is refused.
    if not _is_storable(value, 1):
        _refuse(value, where, 1)


def _is_storable(value: Any, level: int) -> bool:
    if isinstance(value, list):
        return level <= DEEPEST and all(_is_storable(item, level + 1) for item in value)
    if isinstance(value, dict):
        return level <= DEEPEST and all(_is_storable(item, level + 1) for item in value.values())
    return isinstance(value, str) or unstorable(value) is None


def _refuse(value: Any, where: list[str | int], level: int) -> None:
    """Raise the refusal of the first value that cannot be stored."""
    if isinstance(value, list | dict):
        if level > DEEPEST:
            field = where[: len(where) - level + 1]
            message = f"{path(field)} has more than {DEEPEST} levels of lists and objects: flatten it, or send it as text"
            raise invalid(field, short(value), message)
        for key, item in enumerate(value) if isinstance(value, list) else value.items():
            _refuse(item, [*where, key], level + 1)
    elif reason := unstorable(value):
        raise invalid(where, shown(value), f"{path(where)} is {shown(value)}: {reason}")


def check_magnitudes(rows: Sequence[Sequence[float]], bound: float, where: list[str | int]) -> None:
    """Check that no number of `rows` exceeds `bound` in magnitude.

    Raises:
        InvalidRequestError: names the first such number and the bound.
    """
    for index, row in enumerate(rows):
        at = first_beyond(row, bound)
        if at is not None:
            raise beyond(row[at], bound, [*where, index, at])


def beyond(value: float, bound: float, where: list[str | int]) -> InvalidRequestError:
    """The refusal of a number whose magnitude exceeds `bound`."""
    return invalid(where, shown(value), f"{path(where)} is {shown(value)}: its magnitude must be at most {bound:g}")


def unreadable(body: bytes) -> str | None:
    """Say why the JSON reader of trainers and reference workers cannot read `body`; None if it can."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return str(error)
    return None


def shown(value: Any) -> str:
    """A number as text, at most 64 characters. Integers of any size have one."""
    if isinstance(value, int) and abs(value) >= 10**40:  # Python refuses to print integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return str(value)[:64]
