"""The launcher with real processes: exit statuses, signals, killed ranks, and a killed launcher."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.parallel.launch import (
    STORE_VARIABLE,
    RankProcesses,
    caught_signals,
    is_launched,
    loopback_store,
    place_of,
    rank_variables,
)
from example_trainer.parallel.launched import LAUNCHER_VARIABLE
from tests.conftest import Processes
from tests.listening import listeners

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("launched_rank.py")


def start(processes: Processes, count: int, *what: str) -> ManagedProcess:
    return processes.start("launcher", [sys.executable, "-u", SCRIPT, "launch", str(count), *what])


def wait_for_ranks(processes: Processes, launcher: ManagedProcess, count: int) -> list[int]:
    """Process ids of all ranks, once they handle signals."""
    pattern = re.compile(r"rank (\d+) pid (\d+)\n")
    found: dict[int, int] = {}

    def ready() -> str | None:
        found.update(
            {int(r): int(pid) for r, pid in pattern.findall(launcher.log_path.read_text())}
        )
        return None if len(found) == count else f"{len(found)} of {count} ranks are ready"

    processes.wait_until("all ranks are ready", ready, seconds=60)
    return [found[rank] for rank in range(count)]


def test_the_launchers_store_listens_on_loopback_alone() -> None:
    store = loopback_store()
    assert {own.address for own in listeners([os.getpid()]) if own.port == store.port} == {
        "127.0.0.1"
    }


def test_a_launched_rank_knows_its_place() -> None:
    variables = rank_variables(1, 3, 4000)
    assert place_of(variables) == (1, 3, 1)
    assert is_launched(variables)
    assert variables[STORE_VARIABLE] == "127.0.0.1:4000"
    assert variables[LAUNCHER_VARIABLE] == str(os.getpid())
    assert not {"MASTER_ADDR", "MASTER_PORT"} & variables.keys(), "those are the weight bridge's"


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        (
            {"WORLD_SIZE": "1", "RANK": "0"},
            False,
        ),  # as a cluster sets them for a job of one machine
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"WORLD_SIZE": "2"}, True),
    ],
)
def test_who_started_a_process(environment: dict[str, str], launched: bool) -> None:
    assert is_launched(environment) is launched


@pytest.mark.parametrize(
    ("statuses", "status"), [(("0", "0"), 0), (("2", "2"), 2), (("0", "3"), 3)]
)
def test_the_ranks_status_is_the_launchers(
    processes: Processes, statuses: tuple[str, ...], status: int
) -> None:
    launcher = start(processes, 2, "ends", *statuses)
    assert launcher.guard.wait(timeout=60) == status
    assert "ERROR" not in launcher.log_path.read_text(), "ranks log their reasons themselves"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_once(processes: Processes, number: signal.Signals) -> None:
    launcher = start(processes, 2, "signalled")
    wait_for_ranks(processes, launcher, 2)
    os.kill(launcher.command_pid(), number)
    assert launcher.guard.wait(timeout=60) == 128 + number
    text = launcher.log_path.read_text()
    assert text.count(f"saved after {number.name}") == 2


def test_a_signal_to_every_process_of_the_job_is_not_a_second_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As a service manager sends it: to the ranks, and to the launcher, which forwards it."""
    with RankProcesses([sys.executable, str(SCRIPT), "signalled"], 2) as ranks:
        text, deadline = "", time.monotonic() + 60
        while len(pids := re.findall(r"pid (\d+)\n", text)) < 2 and time.monotonic() < deadline:
            text += capfd.readouterr().out
            time.sleep(0.02)
        ranks.poll()
        for pid in map(int, pids):
            os.kill(pid, signal.SIGTERM)
        while (
            any(signal.SIGTERM in caught_signals(int(pid)) for pid in pids)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        ranks.forward(signal.SIGTERM)
        while ranks.running and time.monotonic() < deadline:
            ranks.poll()
            time.sleep(0.02)
        assert sorted(ranks.ended) == [(0, 128 + signal.SIGTERM), (1, 128 + signal.SIGTERM)]
    assert capfd.readouterr().out.count("saved after SIGTERM") == 2


def test_a_killed_rank_is_named_and_ends_the_others(processes: Processes) -> None:
    launcher = start(processes, 3, "waits")
    ranks = wait_for_ranks(processes, launcher, 3)
    os.kill(ranks[1], signal.SIGKILL)
    processes.wait_for_text(launcher, "rank 1 of 3 was killed by SIGKILL", seconds=60)
    for pid in (ranks[0], ranks[2]):  # as the others do when they notice
        os.kill(pid, signal.SIGKILL)
    assert launcher.guard.wait(timeout=60) == 128 + signal.SIGKILL


def test_nothing_outlives_a_killed_launcher(processes: Processes) -> None:
    launcher = start(processes, 2, "waits")
    ranks = [psutil.Process(pid) for pid in wait_for_ranks(processes, launcher, 2)]
    os.kill(launcher.command_pid(), signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive


def test_a_rank_whose_launcher_has_gone_before_it_began_ends(processes: Processes) -> None:
    code = f"import sys; sys.path[0] = {str(SCRIPT.parents[3])!r}; "
    code += "from example_trainer.parallel.launched import end_with_launcher; end_with_launcher(); print('alive')"
    rank = processes.start(
        "rank", [sys.executable, "-c", code], environment={LAUNCHER_VARIABLE: "1"}
    )
    assert rank.guard.wait(timeout=60) == 128 + signal.SIGKILL
    assert "alive" not in rank.log_path.read_text()
