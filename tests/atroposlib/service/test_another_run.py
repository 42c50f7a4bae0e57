"""The queue drops groups that a newly registered trainer cannot have sampled."""

from __future__ import annotations

from .test_queue import draft, registration, started, take


def test_what_a_trainer_cannot_have_sampled_is_dropped_when_it_registers() -> None:
    queue = started(4, ack_batches=True, model="m")
    for version in (0, 1, 2, 3):
        queue.add(draft(version=version), 0.0)
    assert take(queue) == [0]
    queue.ack(None, 3)
    assert (
        queue.register(registration(4, uuid=2, starting_step=2, model="m", ack_batches=True)) == 1
    )
    assert queue.drops == {("ahead_of_trainer", 16): 1}
    assert take(queue) == [1], "what it can have sampled is kept"
    assert queue.register(registration(4, uuid=3, starting_step=0, model="m")) == 2, (
        "the batch that was out goes too"
    )
    assert take(queue) is None


def test_a_batch_that_was_out_comes_back_to_a_trainer_whose_environments_state_no_versions() -> (
    None
):
    queue = started(4)
    for _ in range(3):
        queue.add(draft(), 0.0)
        take(queue)
    queue.add(draft(), 0.0)
    assert queue.register(registration(4, uuid=2)) == 1, (
        "what waited was sampled at version 2, as far as is known"
    )
    assert take(queue) == [2]


def test_another_runs_rollouts_are_not_handed_out() -> None:
    for fields in ({"model": "other"}, {"checkpoint_dir": "elsewhere"}):
        queue = started(4, model="m")
        queue.add(draft(version=0), 0.0)
        queue.add(draft(version=0), 0.0)
        assert take(queue) == [0]
        trainer = registration(4, uuid=2, model="m")
        for name, value in fields.items():
            setattr(trainer, name, value)
        assert queue.register(trainer) == 2
        assert take(queue) is None
        assert queue.drops == {("another_run", 16): 2}


def test_what_an_environment_still_has_of_the_last_run_is_not_accepted() -> None:
    queue = started(4, ack_batches=True)
    queue.ack(None, 7)
    queue.register(registration(4, uuid=2, ack_batches=True))
    receipt = queue.add(draft(version=6), 0.0)
    assert receipt.status == "dropped"
    assert "Does the inference server have its weights?" in str(receipt.reason)
    for version in (
        0,
        1,
        8,
    ):  # its own, one that it is just sending, and one that no earlier trainer ever reached
        assert queue.add(draft(version=version), 0.0).status == "received"
    queue.ack(None, 5)
    assert queue.add(draft(version=6), 0.0).status == "received", "it has come so far itself"
