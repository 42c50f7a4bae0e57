"""A worker that waits for a trainer's writes on the GPU waits for a while, and names the missing
write.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from vllm_patching.protocol.checksum import WeightSums
from vllm_patching.transport.shared_memory import SharedMemoryError, reached_in_time
from vllm_patching.worker.receiving import WeightReceiver


class Event:
    """A CUDA event of another process: reached at the n-th question, never, or broken."""

    def __init__(self, reached_after: int | None, error: str = "") -> None:
        self.left, self.error = reached_after, error

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


class Worker(WeightReceiver):
    def __init__(self, event: Any) -> None:
        self._lockstep_rank, self._lockstep_device = 1, torch.device("cpu")
        self._lockstep_written, self._lockstep_writer = event, ("trainer here:12", 0.05)
        self._lockstep_sums = WeightSums([("w", torch.ones(4))])
        self._lockstep_first_step = self
        self._lockstep_recompute = str

    def watch(self) -> None:
        return None


def test_an_event_is_asked_until_it_is_reached_or_time_is_up() -> None:
    assert reached_in_time(Event(0), 10.0)  # type: ignore[arg-type]
    assert reached_in_time(Event(5), 10.0)  # type: ignore[arg-type]
    assert not reached_in_time(Event(None), 0.01)  # type: ignore[arg-type]
    with pytest.raises(
        SharedMemoryError, match="cannot ask the trainer's CUDA event: invalid resource handle"
    ):
        reached_in_time(Event(0, "invalid resource handle\nmore"), 10.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("event", [None, Event(3)])
def test_writes_that_have_come_are_summed_up(event: Event | None) -> None:
    worker = Worker(event)
    assert worker.lockstep_check_written() == worker.lockstep_check()
    assert worker.lockstep_check()["checksum"]


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (Event(None), "trainer here:12 has not finished its writes on the GPU within 0.05 s"),
        (
            Event(0, "driver shutting down"),
            "whether trainer here:12 has finished its writes cannot be known: .*driver",
        ),
    ],
)
def test_writes_that_do_not_come_are_told_and_hold_nobody_up(event: Event, told: str) -> None:
    answer = Worker(event).lockstep_check_written()
    assert (answer["tp_rank"], answer["checksum"]) == (1, "")
    assert re.search(told, answer["late"])
