"""GET /deterministic: the self-test's report, the trainer that has joined, and the weights."""

from __future__ import annotations

from types import SimpleNamespace

from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_patching.server.routes import LockstepService, make_router


def test_the_report_has_the_kernels_of_both_sides_and_the_weight_version() -> None:
    service = LockstepService()
    app = FastAPI()
    app.include_router(make_router(service))
    with TestClient(app) as client:
        assert client.get("/deterministic").status_code == 503
        service.engine = object()
        refusal = client.get("/deterministic")
        assert refusal.status_code == 404
        assert "start it with --deterministic" in refusal.json()["error"]
        report = {"provenance": {"plan": "parts 1"}, "rotary_table": "0a", "checks": 9}
        service.deterministic = report
        alone = {"trainer": None, "weight_version": 0}
        assert client.get("/deterministic").json() == report | alone
        kernels = {"plan": "parts 1", "rotary_table": "0a"}
        service.bridge = SimpleNamespace(trainer_kernels=kernels)  # type: ignore[assignment]
        service.weights = lambda: (7, 1)
        paired = {"trainer": kernels, "weight_version": 7}
        assert client.get("/deterministic").json() == report | paired
