"""BridgeController against an engine that behaves as vLLM's, one fault at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.virtual_time import VirtualLoop
from tests.vllm_patching.server.bridge_world import POINTS, TIMEOUT, Trainer, World
from tests.vllm_patching.server.fake_engine import Fault
from vllm_patching.protocol.messages import OCCUPIED, BridgeRefusal
from vllm_patching.server.state import Phase

KINDS = ("single_copy", "follows", "direct", "overlapped")


def served_once(world: World, kind: str) -> Trainer:
    """A trainer that has served its version 1."""
    trainer = Trainer(world, kind)
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    assert trainer.log == ["served 1"]
    return trainer


def phase(world: World) -> Phase:
    return world.server.state.phase


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_that_is_stopped_or_killed_anywhere(world: World, kind: str, point: str) -> None:
    for what in ("stopped", "killed"):
        trainer = served_once(world, kind)
        trainer.fate = (point, what)
        trainer.begin()
        world.run(3.5 * TIMEOUT)
        silent = world.server.state.last_error.startswith(
            f"nothing from trainer {trainer.name} for "
        )
        assert world.server.status()["gave_up_waiting"] == (2 if silent else None)
        assert silent <= (what == "stopped")
        assert not world.server.state.in_update, "it waits for a trainer that does not come"
        may_write = what == "stopped" and "write" in point and kind in ("single_copy", "follows")
        if may_write:
            assert phase(world) is Phase.UNHEALTHY
            assert f"end its process: here:{trainer.pid}" in world.server.state.undecided
        trainer.go_on()
        world.run_until(lambda one=trainer: not one.busy, 10 * TIMEOUT)  # type: ignore[misc]
        world.run(1.0)
        if may_write:
            assert trainer.log == ["served 1", "served 2"], "it did the update anew"
        assert not world.server.state.undecided
        world.check_tokens()
        trainer.kill()
    served_once(world, "direct")


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_joins_in_an_update_may_join_after_it(world: World, kind: str) -> None:
    trainer = served_once(world, kind)
    trainer.fate = ("before commit", "stopped")
    trainer.begin()
    world.run_until(lambda: world.server.state.in_update, TIMEOUT)
    other = Trainer(world, kind)
    with pytest.raises(BridgeRefusal, match="cannot join now") as refused:
        world.loop.run_until_complete(other._join())
    assert refused.value.status == OCCUPIED
    trainer.kill()
    world.run(1.0)
    other.begin()
    world.run_until(lambda: not other.busy, 3 * TIMEOUT)
    assert other.log == ["served 1"]
    world.check_tokens()


@pytest.mark.parametrize("kind", KINDS)
def test_derived_tensors_are_computed_before_the_engine_goes_on(world: World, kind: str) -> None:
    world.server._recomputes = True
    served_once(world, kind)
    for rank in world.core.ranks:
        assert rank.derived == world.server.state.checksums[rank.number]


@pytest.mark.parametrize("kind", ["single_copy", "follows"])
def test_a_late_trainer_keeps_others_out_until_it_is_killed(world: World, kind: str) -> None:
    trainer = served_once(world, kind)
    trainer.fate = ("before the write", "stopped")
    trainer.begin()
    world.run(2 * TIMEOUT)
    other = Trainer(world, "direct")
    other.begin()
    world.run_until(lambda: not other.busy, TIMEOUT)
    assert "no other process may write the weights now: trainer t1 may still write" in other.log[0]
    assert (phase(world), world.core.paused) == (Phase.UNHEALTHY, True)
    trainer.kill()
    world.run(1.0)
    assert (phase(world), world.server.trouble(), world.core.paused) == (Phase.SERVING, "", False)
    other.begin()
    world.run_until(lambda: not other.busy, 3 * TIMEOUT)
    assert other.log[-1] == "served 1"


def test_writes_that_the_gpu_has_not_done_in_time_are_not_over(world: World) -> None:
    trainer = served_once(world, "follows")
    trainer.part_seconds = 0.9 * TIMEOUT  # the check ends before anything has changed
    trainer.begin()
    world.run_until(lambda: phase(world) is Phase.UNHEALTHY, 2 * TIMEOUT)
    assert "may still write" in world.server.state.undecided
    world.run_until(lambda: not trainer.busy, 5 * TIMEOUT)
    assert "writes of the trainer have not come" in trainer.log[-1]
    world.run(1.0)
    assert (phase(world), world.server.state.undecided) == (Phase.UNHEALTHY, ""), (
        "the new weights have come, unproven"
    )
    trainer.part_seconds = 0.1
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    assert trainer.log[-1] == "served 2"


def test_a_commit_shows_the_lease(world: World) -> None:
    trainer = served_once(world, "single_copy")
    trainer.fate = ("before commit", "stopped")
    trainer.begin()
    world.run(1.0)
    trainer.lease = "another"  # with which it can neither commit nor give back what it has
    trainer.go_on()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    assert (
        "no other process may write the weights now: trainer t1 may still write" in trainer.log[-1]
    )
    assert phase(world) is Phase.UNHEALTHY
    trainer.kill()
    served_once(world, "single_copy")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("slow", 0.9 * TIMEOUT),
        Fault("slow", 1.5 * TIMEOUT),
        Fault("fails before"),
        Fault("fails after"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_goes_wrong_at_each_place(world: World, kind: str, fault: Fault) -> None:
    """The n-th command of an update is late or fails, for every n."""
    for before in range(9):
        trainer = served_once(world, kind)
        world.core.faults.extend([*[Fault("none")] * before, fault])
        trainer.begin()
        world.run_until(lambda one=trainer: not one.busy, 20 * TIMEOUT)  # type: ignore[misc]
        world.core.faults.clear()
        world.run(4 * TIMEOUT)
        assert not world.server.state.undecided
        assert not world.server.state.in_update
        world.check_tokens()
        trainer.kill()


def test_a_pause_that_times_out_does_not_leave_the_engine_standing(world: World) -> None:
    trainer = served_once(world, "single_copy")
    world.core.faults.append(
        Fault("slow", 1.5 * TIMEOUT, "pause")
    )  # it stands still, and reports it too late
    trainer.begin()
    world.run_until(lambda: not trainer.busy, 5 * TIMEOUT)
    assert "did not answer a pause" in trainer.log[-1]
    world.run(2 * TIMEOUT)
    assert (phase(world), world.core.paused, world.server.trouble()) == (Phase.SERVING, False, "")


def test_an_engine_that_does_not_go_on_is_no_healthy_server(world: World) -> None:
    trainer = served_once(world, "single_copy")
    trainer.spoil = "fails to write"
    trainer.fate = ("before the write", "stopped")
    trainer.begin()
    world.run(2 * TIMEOUT)
    world.core.stalled_until = world.now + 3 * TIMEOUT
    trainer.kill()  # whole again, but the engine cannot be resumed
    world.run(TIMEOUT)
    assert world.server.trouble()
    world.run(4 * TIMEOUT)
    assert (phase(world), world.server.trouble()) == (Phase.SERVING, "")


def test_an_engine_that_resumed_at_the_last_moment_says_with_which_weights(world: World) -> None:
    trainer = served_once(world, "single_copy")
    trainer.fate = ("before commit", "stopped")
    trainer.begin()
    world.run(1.0)
    trainer.go_on()
    world.core.stalled_until = (
        world.now + TIMEOUT + 1.0
    )  # the check is answered after the caller's deadline
    world.run_until(lambda: not trainer.busy, 5 * TIMEOUT)
    world.run(TIMEOUT)
    world.check_tokens()


def test_an_engine_that_goes_on_unheard_labels_its_tokens_rightly(world: World) -> None:
    """The front end is so busy that it learns neither that the engine went on nor, in time, that it
    stands still again.
    """
    trainer = served_once(world, "single_copy")
    trainer.fate = ("before commit", "stopped")
    trainer.begin()
    world.run(1.0)
    trainer.go_on()
    world.core.mute_until = world.now + TIMEOUT + 3.0
    world.run(TIMEOUT + 1.0)
    assert {part for rank in world.ranks for part in rank.live} == {"1/2"}
    world.run_until(lambda: not trainer.busy, 10 * TIMEOUT)
    world.run(4 * TIMEOUT)
    assert "1/2" in world.engine.output_processor.tokens, "it never went on"
    world.check_tokens()
    served_once(world, "direct")


def test_the_watchdog_outlives_its_mistakes(world: World) -> None:
    trainer = served_once(world, "single_copy")
    trainer.fate = ("before the look at the clock", "killed")
    world.watchdog_fails = True
    trainer.begin()
    world.run(4.0)
    assert "a mistake in the watchdog" in world.server.state.last_error
    assert not world.server._watchdog.has_ended
    assert (phase(world), world.server.trouble(), world.core.paused) == (Phase.SERVING, "", False)


def test_without_a_watchdog_no_update_begins_and_health_says_so(world: World) -> None:
    trainer = served_once(world, "single_copy")
    task = world.server._watchdog._task
    assert task is not None
    task.cancel()
    world.run(0.2)
    assert "the bridge's watchdog has ended (cancelled)" in world.server.trouble()
    assert world.server.status()["healthy"] is False
    trainer.begin()
    world.run_until(lambda: not trainer.busy, TIMEOUT)
    assert "watchdog has ended" in trainer.log[-1]
    assert phase(world) is Phase.SERVING


def test_a_server_that_waits_for_weights_stands_still(loop: VirtualLoop, tmp_path: Path) -> None:
    left = {"trainer": f"trainer {os.uname().nodename}:{os.getpid()}", "epoch": 3, "port": 0}
    (tmp_path / "vllm_bridge_config.json").write_text(json.dumps(left))
    world = World(loop, tmp_path)
    world.run(1.0)
    assert (phase(world), world.core.paused) == (Phase.UNHEALTHY, True)
    assert "waiting for its weights" in world.server.trouble()
    world.check_tokens()
    trainer = Trainer(world, "single_copy")
    trainer.fate = (
        "after begin",
        "killed",
    )  # the checkpoint's weights are whole, and not to be served
    trainer.begin()
    world.run(2 * TIMEOUT)
    assert (phase(world), world.core.paused) == (Phase.UNHEALTHY, True)
    served_once(world, "overlapped")


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_resumes_goes_back_in_versions(world: World, kind: str) -> None:
    first = served_once(world, kind)
    for _ in range(2):
        first.begin()
        world.run_until(lambda: not first.busy, TIMEOUT)
    first.kill()
    served_once(world, kind)
    state = world.server.status()
    assert (state["weight_version"], state["weight_epoch"]) == (1, 2)
    world.run(0.5)
    spans = world.spans.finish(world._request, len(world.engine.output_processor.tokens))
    assert [(span.weights.epoch, span.weights.version) for span in spans] == [
        (0, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 1),
    ]
    world._begin_request()


def test_a_trainer_whose_processes_cannot_be_seen_must_give_its_lease_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.vllm_patching.server.bridge_world.FakeWriter.is_here", lambda self: False
    )
    trainer = served_once(world, "single_copy")
    trainer.fate = ("before the write", "stopped")
    trainer.begin()
    world.run(2 * TIMEOUT)
    assert "restart the server, which cannot see here:1 end" in world.server.state.undecided
    trainer.go_on()
    world.run_until(lambda: not trainer.busy, 3 * TIMEOUT)
    assert trainer.log[-1] == "served 2"
