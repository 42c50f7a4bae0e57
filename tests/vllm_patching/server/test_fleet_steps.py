"""A server as one of several: it is called off, put in quarantine, and asked if it serves."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.vllm_patching.server.bridge_world import TIMEOUT, Trainer, World
from tests.vllm_patching.server.fake_engine import Fault
from vllm_patching.protocol.messages import BridgeRefusal, CohortBody
from vllm_patching.server.access import Door
from vllm_patching.server.routes import LockstepService, attach
from vllm_patching.server.state import Phase


def served(world: World, trainer: Trainer, version: int) -> None:
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    assert trainer.log[-1] == f"served {version}", trainer.log


def refusal(world: World, step: Any) -> BridgeRefusal:
    with pytest.raises(BridgeRefusal) as refused:
        world.loop.run_until_complete(step)
    return refused.value


@pytest.mark.parametrize("how", ["abort", "cohort", "quarantine"])
def test_a_begin_that_waits_for_a_member_that_never_comes_is_broken_off(
    world: World, how: str
) -> None:
    trainer = Trainer(world, "direct")
    served(world, trainer, 1)
    trainer.comes_to_cohorts.clear()
    trainer.cohort = ""
    trainer.begin()
    world.run(0.5)
    assert trainer.busy
    assert {rank["phase"] for rank in world.server.status()["ranks"]} == {"joining"}
    asked = {
        "abort": lambda: world.server.abort(trainer.epoch, "another server is lost"),
        "cohort": lambda: world.server.cohort(
            CohortBody(epoch=trainer.epoch, members=1, key=f"{trainer.name}/other")
        ),
        "quarantine": lambda: world.server.quarantine(trainer.epoch, "it is late"),
    }[how]
    began = world.now
    world.loop.run_until_complete(asked())
    assert world.now - began < 1.0
    world.run_until(lambda: not trainer.busy, TIMEOUT)
    assert "was broken off" in trainer.log[-1]
    assert world.server.state.phase is (Phase.UNHEALTHY if how == "quarantine" else Phase.SERVING)
    trainer.comes_to_cohorts.set()
    served(world, trainer, 2)


def test_a_quarantine_is_told_at_once_whatever_the_engine_does(world: World) -> None:
    trainer = Trainer(world, "overlapped")
    served(world, trainer, 1)
    trainer.fate = ("before commit", "stopped")
    trainer.begin()
    world.run(1.0)
    world.core.stalled_until = world.now + 0.8 * TIMEOUT
    trainer.go_on()
    world.run(0.3)  # its commit waits for the engine
    asked = world.loop.create_task(trainer.quarantine("it is late"))
    world.run(0.1)
    assert not asked.done()
    assert (
        world.server.trouble() == "in quarantine: it is late; a full update from a trainer heals it"
    )
    assert world.server.status()["silent_seconds"] > 0.2
    world.run_until(lambda: asked.done() and not trainer.busy, 3 * TIMEOUT)
    assert trainer.log[-1].startswith("BridgeRefusal"), "its version was served"
    assert (world.server.state.phase, world.core.paused) == (Phase.UNHEALTHY, True)
    world.run(2 * TIMEOUT)
    assert world.core.paused, "whole weights do not end a quarantine"
    assert world.server.status()["silent_seconds"] == 0.0
    world.check_tokens()
    served(world, trainer, 2)
    assert (world.server.trouble(), world.server.status()["quarantine"]) == ("", "")


def test_that_an_engine_cannot_be_stopped_is_said_once_and_tried_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(world, "direct")
    served(world, trainer, 1)
    world.core.faults.extend([Fault("fails before", command="pause") for _ in range(6)])
    world.loop.run_until_complete(trainer.quarantine("it is late"))
    world.run(2.0)
    assert (caplog.text.count("could not be stopped"), world.core.paused) == (1, False)
    world.run(2.0)
    assert (caplog.text.count("could not be stopped"), world.core.paused) == (1, True)


def test_what_cannot_be_a_cohort_is_refused(world: World) -> None:
    server = world.server
    trainer, writer = Trainer(world, "direct"), Trainer(world, "single_copy")
    served(world, trainer, 1)
    old = trainer.epoch
    assert "member" in str(
        refusal(world, server.cohort(CohortBody(epoch=old, members=2, index=2, key="t1/x")))
    )
    assert "is to come in cohort 'other'" in str(refusal(world, server.begin(old, 2, "other")))
    served(world, writer, 1)
    assert refusal(world, server.cohort(CohortBody(epoch=old, members=1, key="t1/y"))).status == 409
    assert refusal(world, server.quarantine(old, "a superseded trainer says")).status == 409
    assert "no cohort can be formed" in str(
        refusal(world, server.cohort(CohortBody(epoch=writer.epoch, members=1, key="t2/z")))
    )
    assert server.trouble() == ""


def test_what_is_served_is_told_at_any_time(world: World) -> None:
    service = LockstepService()
    app = FastAPI(openapi_url=None)
    attach(app, service, Door(keys=("secret",)))
    client = TestClient(app)
    told = client.get("/weights").json()
    assert (told["serving"], told["trouble"], told["in_flight"]) == (
        False,
        "the engine is still loading",
        0,
    )
    service.engine, service.bridge = world.engine, world.server
    service.weights = lambda: (world.spans.weights.version, world.spans.weights.epoch)
    trainer = Trainer(world, "overlapped")
    served(world, trainer, 1)
    expected = {
        "weight_version": 1,
        "weight_epoch": trainer.pid,
        "serving": True,
        "trouble": "",
        "in_flight": 1,
    }
    assert client.get("/weights").json() == {"instance": world.server.instance, **expected}
    world.loop.run_until_complete(trainer.quarantine("it is late"))
    told = client.get("/weights")
    assert (told.status_code, told.json()["serving"]) == (200, False)
    assert "it is late" in told.json()["trouble"]
    assert client.post("/generate", headers={"Authorization": "Bearer secret"}).status_code == 503
