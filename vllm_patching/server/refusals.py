"""Answers to bodies that do not validate: 400 with the field, the value and the bound, whatever the
body holds.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

MOST_ERRORS = 5
LONGEST_VALUE = 80


class RefusingRoute(APIRoute):
    """A route that refuses a wrong body by itself.

    FastAPI's and vLLM's own answers repeat the value. They fail with 500 if JSON cannot hold it:
    NaN, or half a surrogate pair.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return JSONResponse({"error": describe(error)}, 400)

        return handled


def describe(error: RequestValidationError) -> str:
    """One line with the first errors: field, value and rule, in characters that every encoding has."""
    found = error.errors()
    lines = [_described(one) for one in found[:MOST_ERRORS]]
    if len(found) > MOST_ERRORS:
        lines.append(f"and {len(found) - MOST_ERRORS} more")
    return "; ".join(lines).encode("utf-8", errors="backslashreplace").decode()


def _described(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != "body") or "the body"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in (
        "missing",
        "json_invalid",
        "value_error",
    ):  # the input is the whole body, or the message has it
        return f"{where}: {message}"
    return f"{where} is {_shown(error.get('input'))}: {message}"


def _shown(value: Any) -> str:
    if (
        isinstance(value, int) and abs(value) >= 10**40
    ):  # Python refuses to print integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
