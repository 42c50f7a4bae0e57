"""Admission keeps the staleness bound: simulated against a queue and a trainer."""

import math

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.runner.items import (
    allowed_workers,
    workers_during_eval,
)

group_sizes = st.sampled_from([1, 2, 4, 8, 16])
most = st.integers(1, 64)
configs = st.builds(
    BaseEnvConfig,
    group_size=group_sizes,
    batch_size=st.integers(1, 8).map(lambda n: 16 * n),
    max_batches_offpolicy=st.integers(0, 5),
)


@given(limits=configs, most=most, queue=st.integers(0, 200))
def test_queue_and_work_together_stay_within_the_bound(
    limits: BaseEnvConfig, most: int, queue: int
) -> None:
    allowed = allowed_workers(limits, most, {"queue_size": queue})
    bound = max(1, limits.max_batches_offpolicy) * limits.batch_size / limits.group_size
    assert 0 <= allowed <= most
    assert allowed == 0 or queue + allowed <= math.ceil(bound)


@given(limits=configs, most=most, finishing=st.lists(st.integers(0, 100), min_size=30, max_size=30))
def test_no_group_is_older_than_the_bound_and_the_trainer_never_starves(
    limits: BaseEnvConfig, most: int, finishing: list[int]
) -> None:
    """Groups carry the step at which they were started and finish in that order; a batch is taken
    whenever there is one.
    """
    batches = max(1, limits.max_batches_offpolicy)
    per_batch = limits.batch_size // limits.group_size
    queue: list[int] = []
    working: list[int] = []
    step = 0
    for finished in finishing * (1 + per_batch // 15):  # one worker fills two batches
        missing = allowed_workers(limits, most, {"queue_size": len(queue)}) - len(working)
        working += [step] * max(0, missing)
        assert working, "nothing in work and no batch: the trainer would wait for ever"
        count = 1 + finished % len(working)
        queue, working = queue + working[:count], working[count:]
        while len(queue) >= per_batch:
            assert step - queue[0] <= batches - 1
            queue, step = queue[per_batch:], step + 1
    assert step > 0


def test_without_a_bound_only_the_number_of_workers_counts() -> None:
    unbounded = BaseEnvConfig(group_size=4, batch_size=8, max_batches_offpolicy=-1)
    assert allowed_workers(unbounded, 7, {"queue_size": 10_000}) == 7


def test_before_a_trainer_has_said_its_batch_size_nothing_is_started() -> None:
    assert allowed_workers(BaseEnvConfig(group_size=4), 7, {}) == 0


@given(limits=configs, most=most, queue=st.integers(0, 100), wanted=st.integers(0, 100))
def test_the_service_may_ask_for_less(
    limits: BaseEnvConfig, most: int, queue: int, wanted: int
) -> None:
    status = {"queue_size": queue}
    allowed = allowed_workers(limits, most, status | {"groups_wanted": wanted})
    assert allowed == min(wanted, allowed_workers(limits, most, status))


def test_a_reserve_is_filled_even_when_others_have_filled_the_queue() -> None:
    reserved = BaseEnvConfig(
        group_size=4,
        batch_size=40,
        max_batches_offpolicy=2,
        min_batch_allocation=0.5,
    )
    full_of_others = {"queue_size": 100, "self_queue_size": 3, "unallocated_fraction": 0.5}
    assert allowed_workers(reserved, 50, full_of_others) == 2 * 40 * 0.5 / 4 - 3


def test_workers_while_an_evaluation_runs() -> None:
    assert workers_during_eval(9, EvalHandlingEnum.STOP_TRAIN, 0.5) == 0
    assert workers_during_eval(9, EvalHandlingEnum.LIMIT_TRAIN, 0.5) == 4
    assert workers_during_eval(9, EvalHandlingEnum.NONE, 0.5) == 9
