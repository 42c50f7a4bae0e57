"""A trainer that dies at any point of its loop: what its checkpoints have learned from, and what
the service still has.

See in_process: the service is a real one, and so is everything else but the signal.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib.wire import TrainerSession
from example_trainer.batch.client import RolloutClient
from example_trainer.errors import RolloutServiceError
from example_trainer.weight_bridge.base import NoBridge
from tests.example_trainer.in_process import STEPS, Trainers
from tests.example_trainer.test_grpo import made_up_group

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

POINTS = [
    "stepped",
    "synced",
    "begun",
    "writing",
    "written",
    "acknowledging",
    "acknowledged",
    "settled",
    "registered",
    "ending",
]
"""In the order of the loop; the last three are passed once, at the beginning or the end of a
trainer."""


@pytest.mark.parametrize("point", POINTS)
def test_with_a_checkpoint_for_each_step_no_batch_is_lost_or_trained_on_twice(
    trainers: Trainers, point: str
) -> None:
    trainers.post(*range(STEPS))
    each = ("--checkpoint-interval", "1")
    # The first trainer settles nothing, and passes the others' points twice before it dies.
    if point in ("settled", "registered", "ending"):
        assert (
            trainers.train(
                *each, point="ending" if point == "ending" else "acknowledging", passes=1
            )
            is False
        )
        if point != "ending":
            assert not trainers.train(*each, "--resume", "auto", point=point)
    else:
        assert not trainers.train(*each, point=point, passes=3 if point == "synced" else 2)
    assert trainers.train(*each, "--resume", "auto")
    assert trainers.line == list(range(STEPS))
    assert trainers.stats()["queue"]["groups"] == 0


def test_a_batch_that_is_in_the_checkpoint_is_not_trained_on_by_a_resume_with_another_batch_size(
    trainers: Trainers,
) -> None:
    """With another size the service takes the batch apart and hands its groups out again, unless it
    learns of the step before.
    """
    trainers.post(*range(4))
    assert not trainers.train("--checkpoint-interval", "1", point="acknowledging")
    trainers.train(
        "--checkpoint-interval",
        "1",
        "--resume",
        "auto",
        "--training-steps",
        "2",
        "--batch-size",
        "8",
    )
    assert trainers.line == [0, 1], "the second step's batch begins with group 1"


def test_the_batch_of_another_services_life_is_left_alone(
    trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers begin at one again; batch 1 of the checkpoint is another one than batch 1 of that
    service.
    """
    trainers.post(*range(2))
    assert not trainers.train("--checkpoint-interval", "1", point="acknowledging")
    httpx.get(f"{trainers.url}/reset_data", timeout=120).raise_for_status()
    trainers.post(*range(1, 4))
    assert trainers.train("--checkpoint-interval", "1", "--resume", "auto")
    assert trainers.line == list(range(STEPS))
    assert "could not be acknowledged" in caplog.text


def test_an_update_that_fails_keeps_the_step_and_its_batch(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers.post(*range(STEPS))
    sync = NoBridge.sync

    def fail(bridge: NoBridge, version: int, *rest: Any) -> Any:
        if version == 2:
            raise ValueError("no error that anybody thought of")
        return sync(bridge, version, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(NoBridge, "sync", fail)
        with pytest.raises(ValueError, match="anybody"):
            trainers.train("--checkpoint-interval", "0")
    assert trainers.saved().keys() == {2}
    assert trainers.train("--checkpoint-interval", "0", "--resume", "auto")
    assert trainers.line == list(range(STEPS))


@st.composite
def deaths(draw: st.DrawFn) -> list[tuple[str, int]]:
    return draw(st.lists(st.tuples(st.sampled_from(POINTS), st.integers(1, 3)), max_size=3))


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(deaths(), st.integers(1, 3))
def test_however_trainers_die_no_weights_learn_from_a_batch_twice_and_few_are_lost(
    rollout_service: str,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    story: list[tuple[str, int]],
    interval: int,
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainers = Trainers(rollout_service, model, tmp_path_factory.mktemp("run"), monkeypatch)
        died = 0
        options = ["--checkpoint-interval", str(interval), "--keep-optimizer-states", "all"]
        trainers.post(*range(STEPS + 3 * (interval - 1)))
        for point, passes in [*story, ("", 0)]:
            if trainers.train(*options, point=point, passes=passes):
                break
            died += 1
            options = [*options[:4], "--resume", "auto"]
        assert len(trainers.line) == STEPS
        assert max(Counter(trainers.line).values()) == 1
        assert trainers.line == sorted(trainers.line)
        lost = set(range(max(trainers.line) + 1)) - set(trainers.line)
        assert len(lost) <= died * (interval - 1)
        assert all(saved.batch is not None for saved in trainers.saved().values())


def test_a_finished_run_says_so_and_ends_with_status_0(
    trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    trainers.post(*range(STEPS))
    assert not trainers.train(point="ending")
    (saved,) = trainers.saved().values()
    assert not trainers.stats()["run_ended"]
    caplog.set_level("INFO")
    assert trainers.train("--resume", "auto")
    assert trainers.stats()["run_ended"], "whoever came to the end died before it said so"
    assert (
        f"Nothing to do: {saved.run} of {trainers.model} has done {STEPS} of {STEPS} steps ({saved.path})"
        in caplog.text
    )
    assert trainers.train("--resume", "auto", "--training-steps", str(STEPS)), (
        "as often as anybody asks"
    )


def test_a_run_that_stops_has_not_ended_and_each_life_has_its_epoch(trainers: Trainers) -> None:
    trainers.post(*range(STEPS))
    assert not trainers.train("--checkpoint-interval", "1", point="acknowledged", passes=2)
    first = trainers.saved()[2].run
    assert trainers.stats()["weight_epoch"] == first.epoch > 0
    with pytest.raises(RolloutServiceError, match="no batch came"):
        trainers.train("--resume", "auto", "--training-steps", "9", "--batch-timeout", "0.1")
    assert not trainers.stats()["run_ended"]
    second = trainers.saved()[STEPS].run
    assert second.lives == (*first.lives, TrainerSession(second.epoch, 2))
    assert trainers.stats()["weight_epoch"] == second.epoch > first.epoch


def test_a_fresh_run_in_a_used_folder_is_the_one_that_auto_continues(trainers: Trainers) -> None:
    trainers.post(*range(STEPS))
    assert trainers.train()
    old = trainers.saved()[STEPS]
    httpx.get(f"{trainers.url}/reset_data", timeout=120).raise_for_status()
    trainers.post(*range(10, 10 + STEPS))
    assert not trainers.train("--checkpoint-interval", "1", point="acknowledged", passes=2)
    fresh = trainers.saved()
    assert fresh.keys() == {2, STEPS}
    assert fresh[2].run.name != old.run.name == fresh[STEPS].run.name
    assert trainers.train("--checkpoint-interval", "0", "--resume", "auto")
    assert trainers.line == list(range(10, 10 + STEPS))
    assert trainers.saved()[STEPS].run.name == fresh[2].run.name


def test_a_new_run_in_an_emptied_folder_gets_nothing_of_the_one_before_it_though_the_clock_went_back(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers.post(*range(3))
    assert not trainers.train("--checkpoint-interval", "1", point="acknowledged", passes=2)
    first = trainers.saved()[2].run
    left_over = made_up_group(20) | {"weight_versions": [0] * 4, "weight_epochs": [first.epoch] * 4}
    shutil.rmtree(trainers.folder / "checkpoints")
    a_day_ago = time.time_ns() - 86_400 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: a_day_ago)
    registered = RolloutClient.register

    def register_and_post(client: RolloutClient, registration: Any) -> None:
        registered(client, registration)
        receipt = httpx.post(f"{trainers.url}/scored_data", json=left_over, timeout=120).json()
        assert receipt["status"] == "dropped"
        trainers.post(*range(10, 10 + STEPS))

    monkeypatch.setattr(RolloutClient, "register", register_and_post)
    assert trainers.train()
    assert trainers.line == list(range(10, 10 + STEPS)), "2 waited when it began"
    second = trainers.saved()[STEPS].run
    assert second.epoch > first.epoch
    assert second.begun == second.epoch
