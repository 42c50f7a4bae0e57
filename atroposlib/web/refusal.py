"""A refusal of an HTTP request, and its two forms: FastAPI's for the service, OpenAI's for the
proxy.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import PlainTextResponse, Response


class HTTPRefusal(Exception):
    """A request that is refused. `RequestLimitsMiddleware` turns it into the answer.

    Attributes:
        headers: of the answer, such as Retry-After.
        plain: the answer is text in place of JSON.
    """

    def __init__(
        self, status: int, detail: str, headers: dict[str, str] | None = None, plain: bool = False
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.plain = status, detail, headers or {}, plain


def detail_answer(refusal: HTTPRefusal) -> Response:
    """Return the answer in FastAPI's form."""
    if refusal.plain:
        return PlainTextResponse(refusal.detail, refusal.status, refusal.headers)
    body = orjson.dumps({"detail": refusal.detail})
    return Response(body, refusal.status, refusal.headers, "application/json")


def fault_of(error: Exception) -> str:
    """Return an error in one line; of a record that pydantic refuses, the first fault and its field.

    The input is left out, for it may be long or secret.
    """
    if not isinstance(error, ValidationError):
        return " ".join(f"{type(error).__name__}: {error}".split())
    fault = error.errors(include_input=False, include_url=False)[0]
    return ": ".join([".".join(map(str, fault["loc"])) or error.title, fault["msg"]])


def openai_error(status: int, message: str) -> dict[str, dict[str, Any]]:
    """Return the body of an error in OpenAI's form."""
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error")
    if status >= 500:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


def openai_answer(refusal: HTTPRefusal) -> Response:
    """Return the answer in OpenAI's form."""
    body = orjson.dumps(openai_error(refusal.status, refusal.detail))
    return Response(body, refusal.status, refusal.headers, "application/json")
