"""How routes answer and refuse, and read what their address says."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from atroposlib.api.refusals import InvalidRequestError


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def refuse(status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
    """An answer that refuses the request and says why."""
    return answer({"detail": detail}, status, headers)


def query_int(request: Request, name: str) -> int | None:
    """An integer of the query; None if it is not there.

    Raises:
        InvalidRequestError: it is no integer, or one that not every JSON reader keeps exactly.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if abs(value) >= 2**53:
        error = {"type": "int_parsing", "loc": ["query", name], "msg": f"{name} must be an integer", "input": text[:64]}
        raise InvalidRequestError([error])
    return value
