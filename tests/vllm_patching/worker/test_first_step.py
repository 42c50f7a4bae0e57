"""The moment of a worker's next step is noted once, and nothing is left on the worker's path
afterwards.
"""

from __future__ import annotations

import time

import pytest

from vllm_patching.worker.receiving import FirstStep


class Worker:
    """Executes steps as vLLM's worker does: a method of its class."""

    def __init__(self) -> None:
        self.steps: list[tuple[object, dict[str, object]]] = []

    def execute_model(self, batch: object, **more: object) -> int:
        self.steps.append((batch, more))
        return len(self.steps)


def test_only_the_first_step_is_noted() -> None:
    worker = Worker()
    first = FirstStep(worker)
    assert worker.execute_model("before") == 1
    assert first.began is None
    first.watch()
    assert first.began is None
    before = time.monotonic()
    assert worker.execute_model("first", intermediate=None) == 2
    began, after = first.began, time.monotonic()
    assert began is not None
    assert before <= began <= after
    assert worker.execute_model("second") == 3
    assert first.began == began
    assert worker.steps == [("before", {}), ("first", {"intermediate": None}), ("second", {})]


def test_watching_again_forgets_and_leaves_the_worker_as_it_was() -> None:
    worker = Worker()
    first = FirstStep(worker)
    for _ in range(3):
        first.watch()
    worker.execute_model("first")
    assert "execute_model" not in vars(worker)
    assert first.began is not None
    first.watch()
    assert first.began is None
    worker.execute_model("next")
    assert first.began is not None
    assert [batch for batch, _ in worker.steps] == ["first", "next"]


def test_a_step_that_fails_still_counts_and_fails() -> None:
    class Broken:
        def execute_model(self) -> None:
            raise RuntimeError("out of memory")

    worker = Broken()
    first = FirstStep(worker)
    first.watch()
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.execute_model()
    assert first.began is not None
