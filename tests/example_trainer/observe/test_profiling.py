"""A trace holds what its steps did and nothing else, and memory has a history on a GPU alone."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from example_trainer.errors import ConfigError
from example_trainer.observe.perf import StepProfiler, memory_history


def run(profiler: StepProfiler, *steps: int) -> None:
    """Multiply matrices of as many rows as the step's number."""
    for step in steps:
        profiler.begin(step)
        with torch.profiler.record_function(f"work of step {step}"):
            torch.ones(step, 2) @ torch.ones(2, 2)
    profiler.close()


def traced(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {
            event["name"]
            for event in json.load(file)["traceEvents"]
            if event["name"].startswith("work of")
        }


@pytest.mark.parametrize(
    "steps",
    [(1, 2, 3, 4, 5), (1, 2, 3, 3, 4), (3, 4)],
    ids=["more follow", "one again", "ends there"],
)
def test_the_steps_that_are_named_are_traced(tmp_path: Path, steps: tuple[int, ...]) -> None:
    run(StepProfiler(range(3, 5), tmp_path, rank=1), *steps)
    assert traced(tmp_path / "steps_3-4.rank1.json.gz") == {"work of step 3", "work of step 4"}


def test_without_steps_nothing_is_made(tmp_path: Path) -> None:
    run(StepProfiler(range(0), tmp_path / "profile"), 1, 2)
    run(StepProfiler(range(7, 8), tmp_path / "behind the end"), 1, 2)
    assert [path.name for path in tmp_path.rglob("*")] == ["behind the end"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler(range(1, 2), tmp_path)
    (tmp_path / "steps_1-1.rank0.json.gz").mkdir()
    run(profiler, 1, 2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"--profile: cannot write {tmp_path}/steps_1-1.rank0.json.gz" in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"--profile cannot write to .*file/profile: Not a directory; give another --log-dir",
    ):
        StepProfiler(range(1, 2), tmp_path / "file" / "profile")


def test_the_history_of_a_cpus_memory_is_refused_with_the_reason(tmp_path: Path) -> None:
    history = memory_history(True, torch.device("cpu"), tmp_path)
    with (
        pytest.raises(
            ConfigError,
            match="--memory-snapshot records the memory of a GPU, and --device is cpu: ",
        ),
        history,
    ):
        pytest.fail("nothing is recorded")
    with memory_history(False, torch.device("cpu"), tmp_path / "none"):
        assert not list(tmp_path.iterdir())


def run_out_twice(observer: Callable[..., None]) -> None:
    for _ in range(2):
        observer(0, 1 << 40, 1 << 36, 0)
    raise RuntimeError("out of memory")


def test_a_gpus_memory_is_written_at_the_end_and_whenever_it_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own functions are stood in for: this machine may have no GPU."""
    recording: list[object] = []
    observers: list[Callable[..., None]] = []
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", **_: recording.append(enabled),
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_text("blocks")
    )
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False
    )
    history = memory_history(True, torch.device("cuda"), tmp_path, rank=2)
    with pytest.raises(RuntimeError, match="out of memory"), history:
        run_out_twice(observers[0])
    names = ["memory.rank2.pickle", "out_of_memory_1.rank2.pickle", "out_of_memory_2.rank2.pickle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert recording == ["all", None]
