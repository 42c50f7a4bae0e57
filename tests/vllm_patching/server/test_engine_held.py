"""When the bridge holds the engine: silence counts while the engine runs or is told to pause, and not while it stands still."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm_patching.server.bridge_world import CLOCKED, TIMEOUT, Trainer, World
from tests.vllm_patching.server.virtual_time import VirtualLoop, virtual_time
from vllm_patching.server.engine_switch import EngineState

TROUBLE = "the engine has not answered for 30 s"


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with virtual_time(*CLOCKED) as made:
        yield made


@pytest.fixture
def world(loop: VirtualLoop, tmp_path: Path) -> World:
    return World(loop, tmp_path, ranks=2)


def states(world: World, trainer: Trainer, seconds: float) -> set[tuple[str, bool, bool]]:
    """Let an update happen. Returns what the engine did, as far as known, whether it was told to pause, and whether held."""
    seen = set()
    trainer.begin()
    end = world.now + seconds
    while trainer.busy and world.now < end:
        world.run(0.01)
        switch = world.server._switch
        seen.add((str(switch.state), switch.pausing, world.server.holds_engine))
    return seen


@pytest.mark.parametrize("kind", ["single_copy", "follows", "direct", "overlapped"])
def test_it_is_held_for_as_long_as_it_stands_still_in_an_update(world: World, kind: str) -> None:
    trainer = Trainer(world, kind)
    assert not world.server.holds_engine
    seen = states(world, trainer, 3 * TIMEOUT)
    assert trainer.log == ["served 1"]
    assert any(held for _, _, held in seen) or kind == "overlapped", "the copy may take no time"
    for state, pausing, held in seen:
        assert held == (state != EngineState.RUNNING and not pausing), (state, pausing, held)
    assert not world.server.holds_engine


def test_an_engine_that_does_not_answer_a_pause_is_not_held(world: World) -> None:
    trainer = Trainer(world, "single_copy")
    states(world, trainer, 3 * TIMEOUT)
    world.core.stalled_until = world.now + 10 * TIMEOUT
    seen = states(world, trainer, 0.9 * TIMEOUT)
    assert (EngineState.UNKNOWN, True, False) in seen
    assert not any(held for _, _, held in seen)


def test_no_update_begins_on_an_engine_that_hangs_and_it_is_named(world: World) -> None:
    trainer = Trainer(world, "direct")
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    world.server.engine_trouble = lambda: TROUBLE
    assert world.server.trouble() == TROUBLE
    status = world.server.status()
    assert (status["healthy"], status["engine_trouble"], status["trouble"]) == (False, TROUBLE, TROUBLE)
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    assert trainer.log[-1] == f"BridgeRefusal: {TROUBLE}"
    assert world.server.state.weight_version == 1
    world.server.engine_trouble = lambda: ""
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    assert trainer.log[-1] == "served 2"
