"""The benchmarks' protocol with their processes, and the verdict on a fault."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.gpu import mps
from bench.gpu.processes import BenchError, Child, Task, Worker, all_stopped, ended_by_sigterm
from bench.gpu.runs import Results
from example_trainer.child_processes.guard import parents
from example_trainer.child_processes.processes import wait_until
from tests.conftest import ROOT
from tests.gpu.bridge_fault_stage import Outcome, note_absence


def test_a_worker_answers_fails_and_is_stopped(tmp_path: Path) -> None:
    worker = Worker("load", "bench.gpu.load", [], tmp_path / "load.log", {})
    with all_stopped(worker):
        with pytest.raises(BenchError, match="load: stop: no load is running"):
            worker.ask("stop", timeout=60)
        assert (
            worker.ask("start", timeout=60, port=1, model="m", concurrency=1, observers=1, vocab=10)
            == {}
        )
        seen = worker.ask("stop", timeout=60)
        assert seen["finished"] == 0
        assert not any(seen["streams"])
    assert worker.poll() is not None


def test_a_worker_that_ends_is_named_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('rank', type=int)\nparser.parse_args()\n"
    )
    (tmp_path / "worker_of_a_rank.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("ceiling", "worker_of_a_rank", ["x"], tmp_path / "ceiling.log", {})
    with (
        all_stopped(worker),
        pytest.raises(
            BenchError, match=r"ceiling (ended with status 2|has ended)(.|\n)*invalid int value"
        ),
    ):
        worker.answer(180, "start")


OWNER = """
import os, signal, sys, time
from pathlib import Path
from bench.gpu.processes import Child
child = Child("child", ["sleep", "600"], Path(sys.argv[1]) / "child.log", {})
os.kill(child.command_pid(), signal.SIGSTOP)
print(child.command_pid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("outer", "asked", "told"),
    [("2,3", "1,0", "3,2"), ("2,3", None, "2,3"), (None, "1", "1"), ("GPU-a,GPU-b", "1", "GPU-b")],
)
def test_a_child_gets_gpus_among_those_of_this_program(
    outer: str | None,
    asked: str | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    environment = {"CUDA_VISIBLE_DEVICES": asked} if asked else {}
    command = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES >&2"]
    child = Child("child", command, tmp_path / "log", environment)
    with all_stopped(child):
        child.wait(120)
    assert (tmp_path / "log").read_text().split() == [told]


CONTROL = """#!/bin/sh
echo "$* $(cat) ${CUDA_VISIBLE_DEVICES:-all} $CUDA_MPS_PIPE_DIRECTORY" >> "$TOLD"
"""


def test_a_command_runs_under_mps_which_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, told, seen = (tmp_path / n for n in ("nvidia-cuda-mps-control", "told", "seen"))
    control.write_text(CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    script = f'echo "$CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY" > {seen}; exit 3'
    assert mps.main(["sh", "-c", script]) == 3
    gpus, pipe = seen.read_text().split()
    assert gpus == "2,3"
    assert [line.split() for line in told.read_text().splitlines()] == [
        ["-d", "all", pipe],
        ["quit", "all", pipe],
    ]
    control.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(BenchError, match="nvidia-cuda-mps-control -d"):
        mps.main(["true"])


def test_kill_minus_9_of_a_benchmark_takes_its_children_along(tmp_path: Path) -> None:
    """A child that is stopped at that moment, too."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()

        def missing() -> str | None:
            return f"process {child} lives on" if child in parents() else None

        wait_until("the end of the child", missing, 60)


def test_of_several_ranks_the_first_ones_answer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchrun, and ranks that do not import what costs most of the time."""
    answer = "{name: os.environ[name] for name in ('RANK', 'WORLD_SIZE')} | asked"
    program = f"import os\nfrom bench.gpu.processes import answer_once\nanswer_once(lambda asked: {answer})\n"
    (tmp_path / "light_ranks.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = Task("two ranks", "light_ranks", {"asked": 7}, tmp_path, seconds=240, ranks=2)
    with all_stopped(task):
        assert task.answer() == {"RANK": "0", "WORLD_SIZE": "2", "asked": 7}


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        (
            "[Fleet] waiting for servers: 0 good, --min-servers 1: http://h:1 (gone); until 12:00:00",
            True,
        ),
        ("[Bridge] vLLM at http://h:1 is gone; looking whether the server was restarted", True),
        ("[Fleet] http://h:1 joined: serves version 3", False),
    ],
)
def test_what_a_trainer_says_of_an_absent_server_is_found_behind_the_mark(
    tmp_path: Path, line: str, noted: bool
) -> None:
    trainer = Worker("trainer", "bench.gpu.load", [], tmp_path / "trainer.log_path", {})
    with all_stopped(trainer):
        before = b"[Fleet] waiting for servers: of an earlier row\n"
        trainer.log_path.write_bytes(before + line.encode())
        outcome = Outcome("x", limit=0.1)
        note_absence(outcome, trainer, len(before))
    assert (outcome.error, bool(outcome.problems)) == ((line, False) if noted else ("", True))


def good() -> Outcome:
    return Outcome(
        "x", 10.0, 2.0, "the trainer, rank 1, version 7", {"rank": r"rank 1\b"}, "old version", "ok"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"seconds": 0.0}, "nothing was measured"),
        ({"seconds": 11.0}, "took 11.0 s, more than 10"),
        ({"must_name": {"phase": "transfer"}}, "does not name the phase"),
        ({"server": "new version"}, "the server is new version, not old version or unhealthy"),
        ({"next_attempt": "refused"}, "the next attempt: refused"),
    ],
)
def test_every_demand_on_a_fault_is_judged(change: dict[str, object], problem: str | None) -> None:
    outcome = good()
    vars(outcome).update(change)
    outcome.judge(("old version", "unhealthy"))
    assert outcome.to_json()["good"] == (problem is None)
    assert [p for p in outcome.problems if problem and problem in p] == outcome.problems


def test_a_results_file_names_no_machine_and_no_path() -> None:
    outcome = good()
    outcome.error = (
        f"trainer {socket.gethostname()}:71 does not fit what is served: /tmp/x1/model, version 7"
    )
    assert (
        outcome.to_json()["error"]
        == "trainer HOST:71 does not fit what is served: MODEL, version 7"
    )


def test_a_measurement_that_fails_loses_no_other(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")

    def fail() -> None:
        raise BenchError("the server ended\nits last line")

    assert results.measure("bridge", "idle", run=lambda: {"median": 1}) == {"median": 1}
    assert results.measure("bridge", "loaded", run=fail) is None
    written = json.loads(results.path.read_text())
    assert written["bridge"]["idle"]["median"] == 1
    assert (
        written["bridge"]["idle"]["measured"].keys()
        == written["measured"].keys()
        == {"commit", "date", "run"}
    )
    assert results.data["bridge"]["loaded"] == {"failed": "the server ended"}
    assert results.failures


def test_sigterm_ends_a_benchmark_as_an_exception_and_nothing_else_later() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopped: list[str] = []

    def benchmark() -> None:
        with ended_by_sigterm(), ExitStack() as stack:
            stack.callback(stopped.append, "child")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        benchmark()
    assert stopped == ["child"]
    assert signal.getsignal(signal.SIGTERM) is before
