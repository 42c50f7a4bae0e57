"""A refusal of an HTTP request, and its two forms: FastAPI's for the service, OpenAI's for the
proxy.
"""

from __future__ import annotations

from typing import Any

import orjson
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
