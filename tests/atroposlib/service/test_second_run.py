"""A run that follows another one on the same service, and the text for a trainer that gets no
batch.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atroposlib.service import metrics
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Environment, Limits
from atroposlib.service.run_state import MAX_REASON
from atroposlib.service.schemas import Registration
from tests.atroposlib.service.trainers import stored

from .test_queue import draft, registration


def join(queue: RolloutQueue, name: str = "gsm8k", now: float = 0.0) -> Environment | None:
    return queue.register_env(name, 1.0, 2, 64, None, now)


def trainer(queue: RolloutQueue, uuid: int, now: float = 0.0) -> Registration:
    """Register a trainer and ask for its first batch."""
    registered = registration(4, uuid=uuid)
    queue.register(registered)
    queue.next_batch(now)
    return registered


def restarted(queue: RolloutQueue) -> RolloutQueue:
    """The queue as a restarted service restores it."""
    queue._state_changed = True  # or the state would not be written again
    for env_id, environment in queue.registry.by_id.items():
        queue.changes.records["environment", env_id] = environment
    return RolloutQueue(snapshot=stored(queue.take_changes()))


@pytest.mark.parametrize("restart", [False, True])
def test_an_environment_that_registers_after_the_end_waits_for_the_next_trainer(
    restart: bool,
) -> None:
    queue = RolloutQueue()
    trainer(queue, 1)
    first = join(queue)
    assert first is not None
    queue.end(1)
    queue = restarted(queue) if restart else queue
    assert join(queue) is None
    queue.register(registration(4, uuid=2))
    assert join(queue) is None, "the next trainer has not asked for a batch yet"
    queue.next_batch(0.0)
    second = join(queue)
    assert second is not None
    assert second.env_id > first.env_id
    assert not queue.status_env(second.env_id, 0.0)["run_ended"]
    assert queue.status_env(first.env_id, 0.0)["run_ended"], (
        "an environment of the ended run still ends, however late it asks"
    )
    queue = restarted(queue)
    assert not queue.status_env(second.env_id, 0.0)["run_ended"]
    assert queue.status_env(first.env_id, 0.0)["run_ended"]


def test_a_second_end_message_ends_no_environment_of_the_next_run() -> None:
    """The trainer that starts with nothing left to do repeats the message of the one before, under
    its own registration.
    """
    queue = RolloutQueue()
    trainer(queue, 1)
    environments = [join(queue), join(queue)]
    for _ in range(2):
        queue.end(1)
    assert all(
        queue.status_env(one.env_id, 0.0)["run_ended"] for one in environments if one is not None
    )
    trainer(queue, 2)
    second = join(queue)
    assert second is not None
    queue.end(2)
    assert queue.status_env(second.env_id, 0.0)["run_ended"]


def test_a_late_environment_of_the_ended_run_does_not_disturb_an_exact_resume() -> None:
    """Exact resume refuses a second environment that fills batches.

    One that only asks and leaves is not one.
    """
    queue = RolloutQueue()
    trainer(queue, 1)
    first = join(queue)
    assert first is not None
    queue.end(1)
    queue.register(registration(4, uuid=2, positions={}))
    queue.next_batch(10.0)
    second = queue.register_env("gsm8k", 1.0, 2, 64, None, 10.0, stream="s")
    assert second is not None
    queue.status_env(first.env_id, 11.0)
    assert "inexact" not in queue.status_env(second.env_id, 12.0)["stream"]


def test_the_figures_of_a_run_list_its_own_environments() -> None:
    """An environment that was killed with SIGKILL in an earlier run must not be listed as silent
    for ever.
    """

    def listed(queue: RolloutQueue) -> list[int]:
        return [one["env_id"] for one in metrics.environments(queue, 5.0)]

    queue = RolloutQueue()
    trainer(queue, 1)
    old = [join(queue), join(queue)]
    queue.end(1)
    assert listed(queue) == [one.env_id for one in old if one is not None], (
        "until another run begins"
    )
    trainer(queue, 2)
    assert listed(queue) == []
    new = join(queue)
    assert new is not None
    assert listed(queue) == [new.env_id]
    assert old[0] is not None
    queue.add(draft(env_id=old[0].env_id, size=2), 4.0)
    assert listed(queue) == [old[0].env_id, new.env_id], "the public SDK goes on with the next run"


# ---- the text for a trainer that waits
# --------------------------------------------------------------------------------------


def waits_because(queue: RolloutQueue, now: float) -> str:
    assert queue.next_batch(now) is None
    assert queue.waiting is not None
    return queue.waiting


def test_the_text_names_the_missing_environment_and_the_remedy() -> None:
    queue = RolloutQueue()
    trainer(queue, 1)
    assert waits_because(queue, 5.0).startswith(
        "0 of 4 sequences are queued; no environment is registered: start one, for"
    )
    environment = join(queue, now=6.0)
    assert environment is not None
    assert "no environment" not in waits_because(queue, 6.0)
    queue.disconnect_env(environment.env_id)
    assert "no environment is registered" in waits_because(queue, 7.0)


def test_an_environment_of_the_ended_run_is_not_taken_for_one_of_this_run() -> None:
    """It was killed with SIGKILL and never disconnected."""
    queue = RolloutQueue()
    trainer(queue, 1)
    first = join(queue, now=1.0)
    assert first is not None
    for _ in range(2):
        queue.add(draft(env_id=first.env_id, size=2), 2.0)
    assert queue.next_batch(2.0) is not None
    queue.ack(1)
    queue.end(1)
    trainer(queue, 2, 3.0)
    assert "no environment is registered" in waits_because(queue, 3.0)
    queue.add(draft(env_id=first.env_id, size=2), 4.0)
    assert "gsm8k_0 posted its last group 1 s ago" in waits_because(queue, 5.0), (
        "the public SDK goes on with the next run"
    )


def test_the_text_says_for_how_long_environments_are_silent_or_post_nothing() -> None:
    queue = RolloutQueue(Limits(silent_after=60.0))
    trainer(queue, 1)
    first, second = join(queue, now=0.0), join(queue, now=0.0)
    assert first is not None
    assert second is not None
    queue.status_env(first.env_id, 20.0)
    text = waits_because(queue, 20.0)
    assert (
        "gsm8k_0 is registered and has posted no group for 20 s, gsm8k_1 is registered and has"
        in text
    )
    assert "inference server" not in text, "a slow model is not a fault yet"
    queue.status_env(first.env_id, 70.0)
    text = waits_because(queue, 70.0)
    assert (
        "gsm8k_0 is registered and has posted no group for 70 s: see its log, and whether its inference server"
        in text
    )
    assert "gsm8k_1 has sent nothing for 70 s: see its log, and start it again" in text
    queue.add(draft(env_id=first.env_id, size=2), 71.0)
    assert "; gsm8k_0 posted its last group 4 s ago" in waits_because(queue, 75.0)
    text = waits_because(queue, 140.0)
    assert (
        "gsm8k_0 has sent nothing for 69 s, gsm8k_1 has sent nothing for 140 s: see its log, and start it again"
        in text
    )


def test_the_text_names_what_an_environment_reports_also_after_it_left() -> None:
    queue = RolloutQueue(Limits(silent_after=60.0))
    trainer(queue, 1)
    environment = join(queue, now=0.0)
    assert environment is not None
    trouble = "gsm8k_0 gives no group: a row of 9 failed"
    for now in (20.0, 70.0):
        queue.status_env(environment.env_id, now, trouble="a row of 9 failed")
    assert queue.news == [trouble], "once for the log"
    text = waits_because(queue, 70.0)
    assert text.endswith(f"gsm8k_0 is registered and has posted no group for 70 s; {trouble}")
    queue.disconnect_env(environment.env_id)
    assert trouble in waits_because(queue, 71.0)
    queue.end(1)
    trainer(queue, 2)
    assert trouble not in waits_because(queue, 72.0)


def test_the_text_leaves_out_an_environment_that_another_one_has_replaced() -> None:
    queue = RolloutQueue(Limits(silent_after=60.0))
    trainer(queue, 1)
    first, beside = join(queue, now=0.0), join(queue, now=0.0)
    assert first is not None
    assert beside is not None
    queue.status_env(first.env_id, 10.0)
    queue.status_env(beside.env_id, 100.0)
    assert "gsm8k_0 has sent nothing for 90 s" in waits_because(queue, 100.0), (
        "gsm8k_1 came before gsm8k_0 fell silent"
    )
    join(queue, now=101.0)  # gsm8k_0 was killed and started again
    text = waits_because(queue, 102.0)
    assert "gsm8k_0" not in text
    assert "gsm8k_1 is registered and has posted no group for 102 s, gsm8k_2 is registered" in text


def test_the_text_counts_what_was_refused_since_the_last_batch_and_why() -> None:
    queue = RolloutQueue()
    queue.register(registration(4, uuid=1, starting_step=5, max_staleness=0, ack_batches=True))
    queue.next_batch(0.0)
    environment = join(queue)
    assert environment is not None
    for _ in range(2):
        queue.add(draft(env_id=environment.env_id, size=2, version=1), 1.0)
    queue.refusals.note_refusal("scores[0] is nan: every number must be finite " + "x" * 1000)
    text = waits_because(queue, 2.0)
    assert (
        "2 groups were dropped since the last batch, the last one because: stale: sampled at weight version 1"
        in text
    )
    assert "1 post was refused since the last batch, the last one because: scores[0] is nan" in text
    assert len(text) < 800 + MAX_REASON
    for _ in range(2):
        queue.add(draft(env_id=environment.env_id, size=2, version=5), 3.0)
    assert queue.next_batch(3.0) is not None
    queue.ack(1, 6)
    text = waits_because(queue, 4.0)
    assert "dropped" not in text
    assert "refused" not in text


def test_many_environments_make_no_long_line() -> None:
    queue = RolloutQueue()
    trainer(queue, 1)
    for _ in range(50):
        join(queue)
    assert ", and 47 more" in waits_because(queue, 1.0)
    assert len(waits_because(queue, 1.0)) < 400


def test_no_reason_remains_after_the_end() -> None:
    queue = RolloutQueue()
    trainer(queue, 1)
    assert queue.waiting
    queue.end(1)
    assert queue.waiting is None


class RunsMachine(RuleBasedStateMachine):
    """Runs one after another on one service that is restarted at any moment.

    Model: an environment gets an id while a trainer takes batches and its run has not ended, and
    ends with that run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = RolloutQueue()
        self.uuid = 0
        self.takes_batches = self.ended = False
        self.of_this_run: set[int] = set()
        self.of_ended_runs: set[int] = set()

    @rule()
    def trainer_registers(self) -> None:
        """For the first time, again after it was killed, or for the next run."""
        self.uuid += 1
        self.queue.register(registration(4, uuid=self.uuid))
        self.takes_batches = self.ended = False

    @precondition(lambda self: self.uuid and not self.ended)
    @rule()
    def trainer_asks(self) -> None:
        self.queue.next_batch(0.0)
        self.takes_batches = True

    @precondition(lambda self: self.uuid)
    @rule(times=st.integers(1, 2))
    def trainer_ends(self, times: int) -> None:
        for _ in range(times):
            self.queue.end(self.uuid)
        self.ended = True
        self.of_ended_runs |= self.of_this_run
        self.of_this_run.clear()

    @rule()
    def environment_registers(self) -> None:
        environment = join(self.queue)
        assert (environment is not None) == (self.takes_batches and not self.ended)
        if environment is not None:
            assert environment.env_id not in self.of_this_run | self.of_ended_runs
            self.of_this_run.add(environment.env_id)

    @precondition(lambda self: self.of_this_run or self.of_ended_runs)
    @rule(data=st.data())
    def environment_leaves(self, data: st.DataObject) -> None:
        self.queue.disconnect_env(
            data.draw(st.sampled_from(sorted(self.of_this_run | self.of_ended_runs)))
        )

    @rule()
    def service_restarts(self) -> None:
        self.queue = restarted(self.queue)

    @invariant()
    def environments_end_with_their_own_run(self) -> None:
        assert self.queue.ended == self.ended
        for env_id in self.of_this_run | self.of_ended_runs:
            assert self.queue.status_env(env_id, 0.0)["run_ended"] == (env_id in self.of_ended_runs)


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
