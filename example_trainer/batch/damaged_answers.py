"""Reads an answer of the rollout service that a strict JSON reader refuses, so that one group costs
no more than itself.

A service of an earlier version may have stored integers beyond 64 bits, NaN or infinities. Python's
own reader takes such documents if it is given functions for the numbers, which here remember where
they could not be used.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from atroposlib.wire import LARGEST_INTEGER, LEAST_INTEGER

_LONGEST_INTEGER = len(str(LARGEST_INTEGER))
_BATCH_ID = re.compile(rb'(?<!\\)"batch_id"\s*:\s*(\d{1,16})\b')
"""Within a string the quotation mark has a backslash in front."""


class UnreadableGroup(dict[str, Any]):
    """A group that cannot be trained on because of a value that no strict reader takes. It is
    empty.

    Attributes:
        reason: names the field and the value.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class _UnreadableNumber:
    def __init__(self, text: str) -> None:
        self.text = text if len(text) <= 40 else f"{text[:20]}… ({len(text)} characters)"


def salvage(content: bytes) -> dict[str, Any] | None:
    """Read an answer of `GET /batch` whose numbers a strict reader refuses.

    Returns:
        The answer, with an UnreadableGroup in the place of each group that holds such a number. If
        nothing but the number of the batch can be read, an answer whose only group is unreadable.
        None if there is no batch in it.
    """
    try:
        answer = json.loads(
            content.decode(errors="replace"),
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_UnreadableNumber,
            strict=False,
        )
    except (ValueError, RecursionError) as error:
        # The service writes the number behind the groups, so the last one is its own.
        numbers = _BATCH_ID.findall(content)
        if not numbers or not content.rstrip().endswith(b"}"):
            return None
        reason = f"the whole batch is no JSON ({type(error).__name__}: {error!s:.200})"
        return {"batch": [UnreadableGroup(reason)], "batch_id": int(numbers[-1])}
    if not isinstance(answer, dict) or not isinstance(answer.get("batch"), list):
        return None
    answer["batch"] = [_checked(group) for group in answer["batch"]]
    return None if _place(answer) is not None else answer


def _checked(group: Any) -> Any:
    place = _place(group)
    return group if place is None else UnreadableGroup(place)


def _place(value: Any) -> str | None:
    """The path and text of the first number that could not be read, as a sentence; None if there is
    none.
    """
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:  # not recursive: the depth is the sender's choice
        where, one = pending.pop()
        if isinstance(one, _UnreadableNumber):
            return f"{where.lstrip('.') or 'it'} is {one.text}, which is neither an integer of 64 bits nor a finite number"
        if isinstance(one, dict):
            pending += [
                (f"{where}.{str(key)[:80]}", item)
                for key, item in reversed(one.items())
                if _may_hold(item)
            ]
        elif isinstance(one, list):
            pending += [
                (f"{where}[{at}]", item)
                for at, item in reversed(list(enumerate(one)))
                if _may_hold(item)
            ]
    return None


def _may_hold(value: Any) -> bool:
    return isinstance(value, list | dict | _UnreadableNumber)


def _integer(text: str) -> int | _UnreadableNumber:
    if len(text.lstrip("-")) > _LONGEST_INTEGER:
        return _UnreadableNumber(text)
    value = int(text)
    return value if LEAST_INTEGER <= value <= LARGEST_INTEGER else _UnreadableNumber(text)


def _float(text: str) -> float | _UnreadableNumber:
    value = float(text)
    return value if math.isfinite(value) else _UnreadableNumber(text)
