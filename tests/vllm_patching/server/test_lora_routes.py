"""The LoRA routes of a server that cannot serve adapters, or not yet."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_patching.server.lora import AdapterSpans
from vllm_patching.server.routes import LockstepService, make_router
from vllm_patching.server.state import Span, Weights

ROUTES = [
    ("GET", "/lora/status"),
    ("GET", "/lora/info"),
    ("POST", "/lora/load"),
    ("POST", "/lora/unload"),
]
BODY = {"path": "/adapters/one", "version": 1}


def client(service: LockstepService) -> TestClient:
    app = FastAPI()
    app.include_router(make_router(service))
    return TestClient(app)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_each_route_wants_the_engine_then_the_flag(method: str, path: str) -> None:
    service = LockstepService()
    server = client(service)
    assert server.request(method, path, json=BODY).status_code == 503
    service.engine = object()
    answer = server.request(method, path, json=BODY)
    assert answer.status_code == 409
    assert "--enable-lora" in answer.json()["error"]


@pytest.mark.parametrize(
    "body",
    [{}, {"path": "/x"}, {**BODY, "version": -1}, {**BODY, "name": "x"}, {**BODY, "path": ""}],
)
def test_a_body_that_does_not_fit_is_refused(body: dict[str, object]) -> None:
    assert client(LockstepService()).post("/lora/load", json=body).status_code == 400


def test_a_request_keeps_the_version_that_it_began_with() -> None:
    spans = AdapterSpans(3)
    spans.start("before")
    spans.weights = Weights(7, 4)
    spans.start("after")
    spans.start("gone")
    spans.forget("gone")
    assert spans.finish("before", 10) == [Span(Weights(0, 3), 10)]
    assert spans.finish("after", 0) == [Span(Weights(7, 4), 0)]
