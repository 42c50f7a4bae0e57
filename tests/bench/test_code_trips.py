"""code_trips.py: calls in the service pass through few files, and their number may only fall."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from bench.call_trip import ROOT, Trip
from bench.code_trips import service_trips, train_trip
from bench.weight_trips import weight_trips
from environments.arithmetic_server import training_problems

MAX_FILES = {"post_group": 10, "get_batch": 10}
MAX_TRAINER_FILES = 24
MAX_WEIGHT_FILES = {"weight_update": 22, "dying_server": 18, "dying_server_both": 28}


async def test_a_group_passes_through_few_files_of_the_service(tmp_path: Path) -> None:
    trips = await service_trips(tmp_path)
    assert trips.keys() == MAX_FILES.keys()
    for name, trip in trips.items():
        assert "atroposlib/service/service.py" in trip.files
        assert len(trip.files) <= MAX_FILES[name], f"{name}: {sorted(trip.files)}"


def test_a_batch_passes_through_few_files_of_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    trip = train_trip(tmp_path)
    assert {
        "atroposlib/service_client.py",
        "example_trainer/batch/packing.py",
        "example_trainer/algorithm/objective.py",
        "example_trainer/training/optimizer.py",
    } <= trip.files
    assert len(trip.files) <= MAX_TRAINER_FILES, sorted(trip.files)


def test_weights_pass_through_few_files(tmp_path: Path) -> None:
    trips = weight_trips(tmp_path)
    assert trips.keys() == MAX_WEIGHT_FILES.keys()
    for name, trip in trips.items():
        assert "example_trainer/weight_bridge/stream.py" in trip.files
        assert len(trip.files) <= MAX_WEIGHT_FILES[name], f"{name}: {sorted(trip.files)}"
    assert "vllm_patching/worker/receiving.py" in trips["weight_update"].files


def test_only_calls_into_the_traced_folders_count() -> None:
    trip = Trip()
    for file in (
        "atroposlib/a.py",
        "atroposlib/a.py",
        "bench/b.py",
        "environments/c.py",
        "atroposlib/a.py",
    ):
        code = compile(
            "def called():\n    trip.note(sys._getframe(), 'call', None)", str(ROOT / file), "exec"
        )
        names = {"trip": trip, "sys": sys}
        exec(code, names)
        names["called"]()  # type: ignore[operator]
    assert trip.row() == {
        "files": 2,
        "changes": 2,
        "names": ["atroposlib/a.py", "environments/c.py"],
    }


def test_garbage_of_an_earlier_trip_does_not_count() -> None:
    def forget_a_suspended_generator() -> None:
        problems = training_problems(1)
        next(problems)
        cycle: list[object] = [problems]
        cycle.append(cycle)

    trip = Trip()
    forget_a_suspended_generator()
    with trip.traced():
        gc.collect()
    assert trip.files == set()
