"""Ranks agree on objects, errors and signals; when one fails or falls silent, the others report it
and end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from example_trainer.errors import ConfigError
from example_trainer.parallel.launch import place_of
from example_trainer.parallel.ranks import Ranks, agreed_stop
from example_trainer.process import StopSignal
from tests.conftest import ROOT, Processes

pytestmark = pytest.mark.nightly

WORKER = Path(__file__).resolve().parent / "ranks_worker.py"


def run_two(processes: Processes, case: str) -> tuple[int, list[str]]:
    """Run two ranks to their end. Returns the exit status and the lines."""
    command = [sys.executable, "-m", "tests.forked_ranks", WORKER, case]
    process = processes.start(case, command, environment={"PYTHONPATH": str(ROOT)}, may_finish=True)
    status = process.guard.wait(timeout=120)
    return status, process.log_path.read_text().splitlines()


@pytest.mark.e2e
def test_every_rank_gets_the_same_objects_errors_and_signals(processes: Processes) -> None:
    status, lines = run_two(processes, "agree")
    assert status == 0, lines
    for expected in (
        "rank 0: listens on: {'127.0.0.1'}",
        "rank 1: listens on: {'127.0.0.1'}",
        "rank 0: NonFiniteError: stepping failed on rank 1: the weight w is NaN",
        "rank 1: NonFiniteError: the weight w is NaN",
        "rank 0: NonFiniteError: comparing failed on rank 1: the weight w is NaN",
        "rank 0: CheckpointError: the disk",
        "rank 1: CheckpointError: writing failed on rank 0: the disk is full",
        "rank 0: stopped by: SIGTERM",
        "rank 1: stopped by: SIGTERM",
    ):
        assert expected in lines


@pytest.mark.e2e
def test_the_others_name_the_rank_that_failed(processes: Processes) -> None:
    status, lines = run_two(processes, "bug")
    assert status == 1
    assert any(
        line.startswith("ERROR ") and line.endswith("[rank 1] ValueError: a surprise")
        for line in lines
    )
    assert any(
        line.startswith("ERROR ")
        and line.endswith("rank 0 gave up: rank 1 failed: ValueError: a surprise")
        for line in lines
    )


@pytest.mark.e2e
def test_a_rank_that_falls_silent_is_not_waited_for_longer_than_the_deadline(
    processes: Processes,
) -> None:
    status, lines = run_two(processes, "silent")
    assert status == 1
    assert any(
        "rank 0 of 2 lost another rank while meeting" in line and "Timed out" in line
        for line in lines
    )


def test_one_process_needs_no_group() -> None:
    ranks = Ranks()
    stop = StopSignal()
    assert agreed_stop(stop, ranks) is stop
    assert ranks.gather({"x"}) == [{"x"}]
    assert ranks.together("working", lambda: 3) == ranks.on_main("working", lambda: 3) == 3


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
    ],
)
def test_torchruns_variables(
    environment: dict[str, str], place: tuple[int, int, int] | None
) -> None:
    assert place_of(environment) == place


def test_half_of_torchruns_variables_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=''.*torchrun"):
        place_of({"WORLD_SIZE": "2", "RANK": "0"})
