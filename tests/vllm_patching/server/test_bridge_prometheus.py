"""The bridge's figures for Prometheus, in one process and with the files of several."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from tests.forked_commands import run_command
from vllm_patching.server.metrics import BridgeMetrics, FollowBridge
from vllm_patching.server.state import BridgeState

ROOT = Path(__file__).resolve().parents[3]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def figures(registry: CollectorRegistry) -> dict[str, float]:
    lines = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line and not line.startswith("#")
    ]
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines)
        if "_created" not in name
    }


def updated(state: BridgeState, version: int) -> None:
    """Take one whole update."""
    state.begin(version)
    state.serve(["sum"])


def test_the_figures_follow_the_state(registry: CollectorRegistry) -> None:
    clock, state = Clock(), BridgeState(weight_version=3)
    metrics = BridgeMetrics(registry, clock)
    metrics.refresh(state.to_json())
    assert figures(registry) == {
        "lockstep_weight_version": 3,
        "lockstep_weight_epoch": 0,
        "lockstep_bridge_epoch": 0,
        "lockstep_bridge_healthy": 1,
        "lockstep_bridge_updating": 0,
        "lockstep_weight_update_bytes": 0,
        "lockstep_weight_update_timestamp_seconds": 0,
        "lockstep_weight_update_age_seconds": 0,
        "lockstep_weight_updates_total": 0,
        "lockstep_weight_update_failures_total": 0,
    }

    state.begin_epoch("trainer", "broadcast")
    state.begin(4)
    metrics.refresh(state.to_json())
    assert figures(registry)["lockstep_bridge_updating"] == 1
    state.fail("a rank is lost", weights_intact=False)
    metrics.refresh(state.to_json())
    now = figures(registry)
    assert (now["lockstep_bridge_healthy"], now["lockstep_weight_update_failures_total"]) == (0, 1)

    state.begin_epoch("trainer", "broadcast", weight_epoch=1_700_000_000_123)
    for version in (4, 5):
        updated(state, version)
    state.last_update = {"to_paused": 0.25, "to_serving": 0.5}
    state.last_bytes = 1024
    clock.now = 1010.0
    metrics.refresh(state.to_json())
    clock.now = 1013.0
    metrics.refresh(state.to_json())
    now = figures(registry)
    assert now["lockstep_weight_version"] == 5
    assert now["lockstep_weight_epoch"] == 1_700_000_000_123
    assert now["lockstep_bridge_healthy"] == 1
    assert now["lockstep_weight_updates_total"] == 2
    assert now["lockstep_weight_update_failures_total"] == 1
    assert now["lockstep_weight_update_bytes"] == 1024
    assert now['lockstep_weight_update_seconds{phase="paused"}'] == 0.25
    assert now["lockstep_weight_update_timestamp_seconds"] == 1010
    assert now["lockstep_weight_update_age_seconds"] == 3


def test_a_server_that_shares_no_weights_shows_its_version(registry: CollectorRegistry) -> None:
    BridgeMetrics(registry).refresh({"weight_version": 7})
    assert figures(registry)["lockstep_weight_version"] == 7
    assert figures(registry)["lockstep_bridge_healthy"] == 1


async def test_a_scrape_and_each_step_of_an_update_refresh_them(
    registry: CollectorRegistry,
) -> None:
    app, state = FastAPI(), BridgeState()

    @app.post("/bridge/commit")
    async def commit() -> dict[str, Any]:
        updated(state, state.weight_version + 1)
        return {}

    @app.get("/metrics")
    async def metrics() -> dict[str, float]:
        return figures(registry)

    follower = FollowBridge(app, BridgeMetrics(registry), state.to_json)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=follower), base_url="http://server"
    ) as client:
        await client.post("/bridge/commit")
        assert figures(registry)["lockstep_weight_updates_total"] == 1
        updated(state, 2)
        assert figures(registry)["lockstep_weight_version"] == 1
        assert (await client.get("/metrics")).json()["lockstep_weight_version"] == 2


SCRAPE = """
import asyncio, sys
sys.path[0] = {root!r}
import httpx
from fastapi import FastAPI
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm_patching.server.metrics import attach_metrics

app = FastAPI()
attach_router(app)  # vLLM's own /metrics
attach_metrics(app, lambda: {{"weight_version": 7, "updates": 2, "failures": 1, "last_update": {{"to_paused": 0.5}}}})

async def scrape(path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        return (await client.get(path)).text

print(asyncio.run(scrape("/metrics")), asyncio.run(scrape("/metrics/")))
"""


@pytest.mark.parametrize(
    "multiprocess", [False, True], ids=["one process", "PROMETHEUS_MULTIPROC_DIR"]
)
def test_vllms_own_metrics_page_shows_them(tmp_path: Path, multiprocess: bool) -> None:
    """In a process of its own, and with the variable in an executed one: prometheus_client reads it
    when it is imported.
    """
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    if multiprocess:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    done = run_command(
        [sys.executable, "-c", SCRAPE.format(root=str(ROOT))],
        environment,
        program=None if multiprocess else "vllm",
    )
    assert done.returncode == 0, done.stdout[-2000:]
    lines = done.stdout.splitlines()
    for line in (
        "lockstep_weight_version 7.0",
        "lockstep_weight_updates_total 2.0",
        "lockstep_weight_update_failures_total 1.0",
        'lockstep_weight_update_seconds{phase="paused"} 0.5',
    ):
        assert lines.count(line) == 2, (line, done.stdout[-3000:])


def test_a_phase_that_the_last_update_did_not_have_shows_no_older_figure(
    registry: CollectorRegistry,
) -> None:
    metrics = BridgeMetrics(registry)
    metrics.refresh({"updates": 1, "last_update": {"to_paused": 0.25, "stalled": 0.5}})
    metrics.refresh({"updates": 2, "last_update": {"to_paused": 0.75}})
    shown = figures(registry)
    assert shown['lockstep_weight_update_seconds{phase="paused"}'] == 0.75
    assert math.isnan(shown['lockstep_weight_update_seconds{phase="stalled"}'])
