"""The trainer's text about reference workers that have groups, or that call no more."""

from __future__ import annotations

from atroposlib.service.pending_groups import ReferenceQueue
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import MISSING, NOBODY, Group
from tests.atroposlib.service.test_queue import draft, env, registration


def stage_with(groups: int) -> ReferenceQueue:
    stage = ReferenceQueue()
    stage.add(
        Group(seq, NOBODY, 2, 8, 100, ((0, 0),), tokens=16, reference=MISSING)
        for seq in range(groups)
    )
    return stage


def test_a_stopped_worker_is_named_with_the_time_at_which_its_groups_go_to_another() -> None:
    stage = stage_with(3)
    stage.lend("one", "m", 32, 60.0, 100.0)
    stage.lend("two", "m", 16, 60.0, 110.0)
    assert (
        stage.why_waiting(120.0)
        == "3 groups wait for ref_logprobs; 2 are at worker one, 1 are at worker two"
    )
    stopped = (
        "2 are at worker one, which has sent nothing for 35 s; they go to another worker in 25 s"
    )
    assert (
        stage.why_waiting(135.0)
        == f"3 groups wait for ref_logprobs; {stopped}, 1 are at worker two"
    )
    assert len(stage.lend("two", "m", 1000, 60.0, 159.0)) == 0
    assert len(stage.lend("two", "m", 1000, 60.0, 160.0)) == 2, (
        "the lease of the stopped one has ended"
    )
    assert stage.why_waiting(161.0) == "3 groups wait for ref_logprobs; 3 are at worker two"
    group = next(iter(stage.waiting.values()))
    stage.answer("one", group, computed=True, now=162.0)
    assert group.seq not in stage.waiting
    assert stage.was_answered(group.seq), (
        "what the other one computes of it later is answered as accepted, and not taken"
    )


def test_a_worker_that_was_the_last_to_ask_is_named_when_its_lease_has_ended() -> None:
    stage = stage_with(1)
    stage.lend("one", "m", 16, 60.0, 100.0)
    text = stage.why_waiting(175.0)
    assert text is not None
    assert text.startswith(
        "1 groups wait for ref_logprobs, and no reference worker has asked for any for 75 s (one was the last one): start one"
    )


def test_no_more_than_three_workers_are_named() -> None:
    stage = stage_with(5)
    for number in range(5):
        stage.lend(f"w{number}", "m", 1, 60.0, float(number))
    assert str(stage.why_waiting(10.0)).endswith("1 are at worker w2, and at 2 more workers")


def test_environments_are_not_blamed_for_a_batch_that_waits_for_workers() -> None:
    queue = RolloutQueue()
    queue.register(registration(8, ref_logprobs_from_workers=True, model="m"))
    assert queue.next_batch(0.0) is None
    env_id = env(queue)
    for _ in range(2):
        queue.add(draft(env_id=env_id, referenced=False), 1.0)
    assert queue.next_batch(200.0) is None
    assert queue.waiting == "0 of 8 sequences are queued; 2 groups wait for ref_logprobs"
    queue.register(registration(16, ref_logprobs_from_workers=True, model="m"))
    assert queue.next_batch(200.0) is None
    assert "task_0 has sent nothing for 199 s" in str(queue.waiting), (
        "two groups of 4 make no batch of 16"
    )
