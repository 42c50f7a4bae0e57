"""engine_core/progress.py: the API process learns of a step of a new shape while that step is under
way.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.engine_core import progress
from vllm_patching.engine_core.progress import FirstSteps, StepWatch


def batch(tokens: int, requests: int = 1, new: bool = False) -> Any:
    counts = {str(number): 1 for number in range(requests)}
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens=counts,
        scheduled_new_reqs=["r"] * new,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "steps"
    path.touch()
    return path


def test_both_sides_see_the_same_memory_after_the_file_is_gone(file: Path) -> None:
    here, there = FirstSteps(file, 2), FirstSteps(file, 2)
    here.remove_file()
    assert not file.exists()
    there.begin(1, 12.5)
    assert [here.under_way(0), here.under_way(1)] == [False, True]
    there.end(1)
    assert not here.under_way(1)


def test_only_the_first_step_of_a_shape_is_marked(file: Path) -> None:
    marks = FirstSteps(file, 1)
    watch = StepWatch(marks, 0, clock=lambda: 1.0)
    seen = []
    for tokens in (100, 1, 101, 1, 300):
        watch.begins(batch(tokens))
        seen.append(marks.under_way(0))
        watch.ended()
        assert not marks.under_way(0)
    assert seen == [True, True, False, False, True]
    assert watch.executed == 5


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4), st.booleans()), max_size=30),
    st.integers(1, 3),
    st.data(),
)
def test_a_mark_stands_exactly_as_long_as_a_batch_of_a_new_shape_is_under_way(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[tuple[int, int, bool]],
    most: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("steps") / "file"
    path.touch()
    marks = FirstSteps(path, 1)
    watch = StepWatch(marks, 0, clock=lambda: 1.0)
    shapes, under_way = set(), deque[bool]()
    for tokens, requests, new in batches:
        while len(under_way) == most or (under_way and data.draw(st.booleans())):
            under_way.popleft()
            watch.ended()
            assert marks.under_way(0) == any(under_way)
        shape = progress.shape_of(tokens, requests, new)
        watch.begins(batch(tokens, requests, new))
        under_way.append(shape not in shapes)
        shapes.add(shape)
        assert marks.under_way(0) == any(under_way)


class Core:
    """As much of vLLM's EngineCore as is followed."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0))

    def __init__(self, queued: bool = False) -> None:
        self.model_executor = SimpleNamespace(execute_model=lambda scheduled, non_block: scheduled)
        self.scheduler = SimpleNamespace(requests={})
        self.paused, self.outputs = False, None if queued else {}

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def step(self) -> tuple[Any, bool]:
        self.model_executor.execute_model(batch(4), non_block=True)
        return self.outputs, True

    step_with_batch_queue = step


def test_an_engine_core_tells_its_steps_and_the_requests_that_are_due(file: Path) -> None:
    class Followed(Core):
        """A class of its own, since installing changes it."""

    progress.install(Followed)
    progress.install(Followed)  # plugins are loaded more than once
    core = Followed()
    core.step()  # before the API process has asked for it
    getattr(core, progress.WATCH_STEPS)(str(file), 1)
    getattr(core, progress.WATCH_STEPS)(str(file), 1)
    told = getattr(core, progress.PROGRESS)
    assert told() == {"executed": 0, "due": 0}
    for _ in range(3):
        core.step()
    statuses = ("RUNNING", "WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED")
    core.scheduler.requests = {
        name: SimpleNamespace(status=SimpleNamespace(name=name)) for name in statuses
    }
    assert told() == {"executed": 3, "due": 3}
    core.paused = True
    assert told() == {"executed": 3, "due": 0}
    assert not FirstSteps(file, 1).under_way(0)


def test_a_batch_without_results_yet_is_still_under_way(file: Path) -> None:
    class Followed(Core):
        """A class of its own, since installing changes it."""

    progress.install(Followed)
    core = Followed(queued=True)
    getattr(core, progress.WATCH_STEPS)(str(file), 1)
    core.step_with_batch_queue()
    assert FirstSteps(file, 1).under_way(0)
    core.outputs = {}
    core.step_with_batch_queue()
    assert not FirstSteps(file, 1).under_way(0)
