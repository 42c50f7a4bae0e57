"""RequestLimitsMiddleware: one middleware, whose refusals have the form of the service or of
OpenAI.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from atroposlib.inference.proxy import ProxyLimits
from atroposlib.web.middleware import (
    SMALL_BODY,
    Access,
    HTTPRefusal,
    RequestLimits,
    RequestLimitsMiddleware,
    detail_answer,
    openai_answer,
)

LOCAL = Access(bound_to="127.0.0.1")
SERVICE, PROXY = RequestLimits(access=LOCAL), ProxyLimits(LOCAL).of_requests()


async def count(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def refuse(request: Request) -> Response:
    status = int(request.query_params["status"])
    raise HTTPRefusal(status, "not today", {"Retry-After": "7"})


async def refuse_late(request: Request) -> Response:
    async def pieces() -> object:
        yield b"begun"
        raise HTTPRefusal(503, "too late")

    return StreamingResponse(pieces())  # type: ignore[arg-type]


def client(
    limits: RequestLimits, form: Callable[[HTTPRefusal], Response] = openai_answer
) -> httpx.AsyncClient:
    routes = [
        Route("/count", count, methods=["POST"]),
        Route("/scored_data", count, methods=["POST"]),
        Route("/refuse", refuse),
        Route("/refuse_late", refuse_late),
    ]
    app = Starlette(
        routes=routes, middleware=[Middleware(RequestLimitsMiddleware, limits=limits, refuse=form)]
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (502, "server_error")],
)
async def test_a_refusal_of_a_route_is_answered_in_the_form_of_its_server(
    status: int, kind: str
) -> None:
    async with client(PROXY) as http:
        openai = await http.get(f"/refuse?status={status}")
    async with client(SERVICE, detail_answer) as http:
        ours = await http.get(f"/refuse?status={status}")
    assert openai.status_code == ours.status_code == status
    assert openai.headers["retry-after"] == ours.headers["retry-after"] == "7"
    assert openai.json() == {"error": {"message": "not today", "type": kind, "code": status}}
    assert ours.json() == {"detail": "not today"}


async def test_a_refusal_after_the_answer_has_begun_is_not_a_second_answer() -> None:
    async with client(PROXY) as http:
        with pytest.raises(HTTPRefusal, match="too late"):
            await http.get("/refuse_late")


@pytest.mark.parametrize(
    ("limits", "path", "is_taken"),
    [(SERVICE, "/count", False), (SERVICE, "/scored_data", True), (PROXY, "/count", True)],
)
@pytest.mark.parametrize("packs", [False, True])
async def test_large_bodies_go_to_paths_for_them(
    limits: RequestLimits, path: str, is_taken: bool, packs: bool
) -> None:
    body = b" " * (SMALL_BODY + 1)
    headers = {"content-encoding": "gzip"} if packs else {}
    async with client(limits) as http:
        answer = await http.post(
            path, content=gzip.compress(body) if packs else body, headers=headers
        )
    if is_taken:
        assert (answer.status_code, answer.text) == (200, str(len(body)))
    else:
        assert answer.status_code == 413
        assert limits.remedy in answer.json()["error"]["message"]


async def test_a_caller_without_the_key_sends_no_large_body() -> None:
    keyed = replace(PROXY, access=Access("s3cret"))
    async with client(keyed) as http:
        answer = await http.post("/", content=b" " * SMALL_BODY)
        assert (answer.status_code, "65536 bytes" in answer.text) == (413, True)
        assert (await http.post("/count", content=b" ")).status_code == 401
