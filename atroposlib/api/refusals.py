"""A request that does not validate, and how its refusal names the place and the value."""

from __future__ import annotations

from typing import Any


class InvalidRequestError(ValueError):
    """The body does not validate. Holds what a 422 answer lists."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(error["msg"] for error in errors))
        self.errors = errors


def invalid(where: list[str | int], value: Any, message: str) -> InvalidRequestError:
    """One error at one place of the body: its path, the value found there, and what is wrong with it."""
    return InvalidRequestError([{"type": "value_error", "loc": ["body", *where], "msg": message, "input": value}])


def path(where: list[str | int] | tuple[str | int, ...]) -> str:
    """tokens[0][3]"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".") or "the body"


def short(value: Any) -> Any:
    """An input value as it can be shown: short, and without NaN, which JSON does not have."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int | float) and not abs(value) < 2**53:
        return str(value)[:64]
    return value if not isinstance(value, str) or len(value) <= 200 else value[:200] + "…"
