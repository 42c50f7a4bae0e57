"""A trainer and an engine that take turns with one GPU's memory. No fault lets it sample without
keys and values, and the server samples again.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual_time import VirtualLoop, virtual_time
from tests.vllm_patching.server.bridge_world import CLOCKED, TIMEOUT, FakeWriter, Trainer, World
from tests.vllm_patching.server.fake_engine import CACHE_BYTES, PARAMETERS, Fault
from vllm_patching.protocol.messages import OCCUPIED, BridgeRefusal
from vllm_patching.server.state import Phase
from vllm_patching.server.turns import VARIABLE, Turn, prepare

COMMANDS = ("pause", "lockstep_give_back", "lockstep_take_again", "resume")
KINDS = ("fails before", "fails after", "slow")


@pytest.fixture
def world(world: World) -> World:
    world.loop.run_until_complete(world.server.turns.open())
    return world


class Colocated(Trainer):
    """Does its updates in its turn, and asks for its turn's end until it is granted, for `patience`
    seconds.
    """

    patience = 3 * TIMEOUT

    async def _update_for_sure(self) -> None:
        if not self.joined:
            await super()._update_for_sure()
            return
        turns = self.world.server.turns
        try:
            answer = await self._call("rest", lambda: turns.rest(self.epoch))
            self.log.append(f"its turn: {answer['bytes']} bytes")
            await super()._update_for_sure()
        except (BridgeRefusal, TimeoutError, OSError) as error:
            self.log.append(f"no turn: {error}")
        deadline = self.world.now + self.patience
        while True:
            try:
                await self._call("wake", lambda: turns.wake(self.epoch))
                return
            except Exception as error:  # noqa: BLE001 - of any kind; the log has it, and the last one is looked at
                self.log.append(f"no wake: {error}")
                if self.world.now > deadline:
                    return
            await asyncio.sleep(0.5)


def joined(world: World) -> Colocated:
    trainer = Colocated(world, "single_copy")
    finish(world, trainer)
    assert trainer.log == ["served 1"]
    return trainer


def finish(world: World, trainer: Trainer) -> None:
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 20 * TIMEOUT)


def samples(world: World) -> bool:
    """Report if tokens come, and the server reports the same."""
    before = len(world.engine.output_processor.tokens)
    world.run(1.0)
    told = world.server.status()
    well = (told["turn"], told["turn_reason"], told["trouble"], told["engine"]) == (
        "sampling",
        "",
        "",
        "running",
    )
    well = well and not world.server.holds_engine
    return well and len(world.engine.output_processor.tokens) > before


def test_an_update_in_the_trainers_turn_is_served_when_it_ends(world: World) -> None:
    trainer = joined(world)
    trainer.fate = ("before wake", "stopped")
    trainer.begin()
    world.run(2 * TIMEOUT)
    assert trainer.log == ["served 1", f"its turn: {2 * CACHE_BYTES} bytes", "served 2"]
    told = world.server.status()
    assert (told["turn"], told["state"], told["trouble"], told["weight_version"]) == (
        "training",
        "serving",
        "",
        2,
    )
    assert "computes on this GPU; requests wait" in told["turn_reason"]
    assert world.core.paused
    assert all(rank.cache_away for rank in world.ranks)
    world.check_tokens()  # and the next request comes in the trainer's turn
    trainer.go_on()
    world.run_until(lambda: not trainer.busy, TIMEOUT)
    assert samples(world)
    assert set(world.engine.output_processor.tokens) == {f"{trainer.pid}/2"}, (
        "none with the weights before"
    )
    world.check_tokens()


@pytest.mark.parametrize(
    "point", ["after rest", "before begin", "before the write", "after commit", "before wake"]
)
def test_a_trainer_that_is_killed_in_its_turn_ends_it(world: World, point: str) -> None:
    trainer = joined(world)
    trainer.fate = (point, "killed")
    trainer.begin()
    world.run_until(lambda: trainer.killed, 2 * TIMEOUT)
    world.run(1.5)
    assert samples(world)
    other = joined(world)
    finish(world, other)
    assert other.log[-1] == "served 2"
    assert samples(world)


def test_half_written_weights_are_not_served_when_the_turn_ends(world: World) -> None:
    trainer = joined(world)
    trainer.begin()
    world.run_until(lambda: world.ranks[0].live[0] == f"{trainer.pid}/2", TIMEOUT)
    trainer.kill()
    world.run(2.0)
    assert world.server.state.phase is Phase.UNHEALTHY
    assert "the weights are not whole" in world.server.trouble()
    assert world.core.paused
    assert not any(rank.cache_away for rank in world.ranks), (
        "a trainer that mends them may join a server that has its memory"
    )
    joined(world)
    assert samples(world)


def test_requests_that_come_while_turns_change_are_not_refused(world: World) -> None:
    trainer = joined(world)
    for command in ("pause", "resume"):
        world.core.faults.append(Fault("slow", 0.5 * TIMEOUT, command))
        trainer.begin()
        while trainer.busy:
            world.run(0.1)
            assert not world.server.trouble(), command


def test_a_stopped_trainer_keeps_its_turn_and_others_out(world: World) -> None:
    trainer = joined(world)
    trainer.fate = ("after rest", "stopped")
    trainer.begin()
    world.run(5 * TIMEOUT)
    assert world.server.turns.turn is Turn.TRAINING
    other = Colocated(world, "single_copy")
    finish(world, other)
    assert f"trainer {trainer.name} has had its turn on this GPU for " in other.log[0]
    trainer.kill()
    other.log.clear()
    finish(world, other)
    assert other.log == ["served 1"], "at once, before the watchdog has looked"
    world.run(1.0)
    assert samples(world)


def test_a_trainer_that_joins_in_an_update_of_a_dead_one_in_its_turn_does_not_end_the_pause(
    world: World,
) -> None:
    trainer = joined(world)
    trainer.fate = ("in the write", "stopped")
    trainer.begin()
    world.run_until(lambda: world.server.state.in_update, TIMEOUT)
    world.run_until(lambda: trainer.may_write, TIMEOUT)
    trainer.kill()
    other = Colocated(world, "single_copy")
    with pytest.raises(BridgeRefusal, match="cannot join now") as refused:
        world.loop.run_until_complete(other._join())
    assert refused.value.status == OCCUPIED
    assert world.core.paused
    world.run(1.0)
    finish(world, other)
    assert samples(world)
    world.check_tokens()


def test_memory_that_is_not_there_is_named_and_taken_when_it_is(world: World) -> None:
    trainer = joined(world)
    world.ranks[1].memory_taken = 300
    finish(world, trainer)
    assert "rank 1: 1000 bytes wanted, 300 not free" in trainer.log[-1]
    assert "it is tried again and again" in world.server.trouble()
    assert world.core.paused
    world.ranks[1].memory_taken = 0
    world.run(1.0)
    assert samples(world)
    finish(world, trainer)
    assert trainer.log[-1] == "served 3", "the turn after that is as any other"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_fails_does_not_keep_the_server_from_sampling(
    world: World, command: str, kind: str
) -> None:
    trainer = joined(world)
    world.core.faults.append(Fault(kind, 1.5 * TIMEOUT, command))
    finish(world, trainer)
    world.run(2 * TIMEOUT)
    assert samples(world), world.server.status()
    finish(world, trainer)
    assert trainer.log[-1].startswith("served"), trainer.log
    assert samples(world)
    world.check_tokens()


fault = st.tuples(st.sampled_from(COMMANDS), st.sampled_from(KINDS), st.floats(0.1, 1.6))
step = st.tuples(
    st.sampled_from(["turn", "kill", "take memory", "free memory"]), st.lists(fault, max_size=2)
)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(step, min_size=1, max_size=5))
def test_whatever_happens_it_samples_again(
    steps: list[tuple[str, list[tuple[str, str, float]]]],
) -> None:
    with virtual_time(*CLOCKED) as loop, tempfile.TemporaryDirectory() as folder:
        world = World(loop, Path(folder), ranks=2)
        loop.run_until_complete(world.server.turns.open())
        trainer = joined(world)
        for what, faults in steps:
            world.core.faults.extend(
                Fault(kind, times * TIMEOUT, command) for command, kind, times in faults
            )
            if what in ("take memory", "free memory"):
                world.ranks[0].memory_taken = int(what == "take memory")
            trainer.fate = ("before pause", "killed") if what == "kill" else ("", "")
            finish(world, trainer)
            if trainer.killed:
                trainer = Colocated(world, "single_copy")
        world.ranks[0].memory_taken = 0
        world.core.faults.clear()
        world.run(4 * TIMEOUT)
        finish(world, trainer)
        finish(world, trainer)
        assert samples(world), (world.server.status(), trainer.log)
        assert not any(rank.cache_away for rank in world.ranks)
        world.check_tokens()


def test_what_is_refused(world: World, loop: VirtualLoop, tmp_path: Path) -> None:
    turns = world.server.turns
    with pytest.raises(BridgeRefusal, match="no epoch 5: join with POST"):
        loop.run_until_complete(turns.rest(5))

    class Elsewhere(FakeWriter):
        def is_here(self) -> bool:
            return False

    answer = loop.run_until_complete(
        world.server.init(
            "t",
            "single_copy",
            PARAMETERS,
            [Elsewhere("there", 1, 0, Trainer(world, "single_copy"))],
        )
    )
    with pytest.raises(
        BridgeRefusal, match=r"there:1 of t cannot be seen from here.*one container"
    ):
        loop.run_until_complete(turns.rest(answer["epoch"]))
    turns.bytes = 0
    with pytest.raises(BridgeRefusal, match="start it with --colocate"):
        loop.run_until_complete(turns.rest(answer["epoch"]))
    with pytest.raises(BridgeRefusal, match="start it with --colocate"):
        loop.run_until_complete(turns.wake(answer["epoch"]))


def test_a_server_says_what_does_not_go_with_turns() -> None:
    flags = {"colocate": True, "inflight_cache": "recompute", "data_parallel_size": 1}
    variables = {VARIABLE: "1"}
    assert prepare(argparse.Namespace(**{**flags, "colocate": False}), True, variables) == ""
    assert not variables
    assert prepare(argparse.Namespace(**flags), True, variables) == ""
    assert variables == {VARIABLE: "1"}
    assert "VLLM_ENABLE_SHARED_WEIGHTS=1" in prepare(argparse.Namespace(**flags), False, variables)
    assert not variables
    assert "no keys and values survive" in prepare(
        argparse.Namespace(**{**flags, "inflight_cache": "keep"}), True, variables
    )
    assert "--data-parallel-size 2" in prepare(
        argparse.Namespace(**{**flags, "data_parallel_size": 2}), True, variables
    )
