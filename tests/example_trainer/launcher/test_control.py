"""Starting, watching and stopping a stack of small real processes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from atroposlib.utils.processes import Identity, identify
from example_trainer.child_processes.guard import descendants
from example_trainer.child_processes.ports import is_free
from example_trainer.child_processes.processes import ProcessDied
from example_trainer.launcher import control, status
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.control import Part, Starter, claimed, stop_parts
from example_trainer.launcher.options import parse
from example_trainer.launcher.records import PARTS, Record, Records, parts_of
from example_trainer.launcher.stack import Stack
from example_trainer.launcher.status import collect, table, time_of_line
from tests.example_trainer.launcher.small_stack import (
    FAILS,
    FINISHES,
    STUBBORN,
    SmallStack,
    small_options,
)

pytestmark = pytest.mark.nightly


class Run:
    """One run folder, and the output about it."""

    def __init__(self, folder: Path, ports: tuple[int, ...]) -> None:
        self.folder, self.ports = folder, ports
        self.said: list[str] = []
        self.records = Records(folder)

    def start(self, *parts: str, **codes: str) -> None:
        there = parts_of(len(self.ports) - 2)
        options = small_options(
            self.folder, self.ports, tuple(p for p in there if not parts or p in parts)
        )
        stack = SmallStack(options, **codes)
        Starter(stack, self.said.append).run()
        # Before its first line a command may not be there yet, and could overwrite a test's lines.
        eventually(
            lambda: all(stack.log(part).read_text().endswith("\n") for part in options.parts),
            "not every command has begun",
        )

    def stop(self, *parts: str) -> bool:
        return stop_parts(self.folder, parts or self.records.parts(), self.said.append)

    def pids(self) -> dict[str, list[int]]:
        found = {part: self.records.read(part) for part in self.records.parts()}
        return {
            part: [r.keeper.pid, *descendants(r.keeper.pid)]
            for part, r in found.items()
            if r and r.keeper.is_alive()
        }

    def states(self) -> dict[str, str]:
        return {row.part: row.state for row in collect(self.folder).rows}

    def text(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def run(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    monkeypatch.setattr(status, "PROBE_SECONDS", 60.0)  # the machine may be busy
    made = Run(tmp_path / "run", (free_port(), free_port(), free_port()))
    yield made
    made.stop()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if identify(pid)]


def eventually(done: Callable[[], bool], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_whole_stack_starts_shows_its_state_and_stops_in_order(run: Run) -> None:
    run.start()
    pids = run.pids()
    assert list(pids) == list(PARTS)
    assert (run.folder / "vllm.log").read_text().startswith("child ")
    assert [
        path for path in (run.folder, *run.folder.rglob("*")) if path.lstat().st_mode & 0o077
    ] == []
    metrics = run.folder / "trainer" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 3}\n{"step": 4}\n{"ste')
    (run.folder / "env.log").write_text("12:00 INFO fine\nValueError: a wrong answer\n")

    status = collect(run.folder)
    assert status.good
    assert (status.served, status.step, status.queue) == (3, 4, 5)
    os.utime(metrics, (1.0, time.time() - 600))
    shown = table(collect(run.folder), run.folder, time.time())
    assert "weight version served 3, trainer's last step 4 at " in shown
    assert " (10 min), queue 5 groups" in shown
    assert "last error of environment: ValueError: a wrong answer" in shown
    assert f"see the run at http://localhost:{run.ports[0]}/ui " in shown
    assert f"{run.ports[1]}  healthy" in shown
    assert json.dumps(status.to_json())

    run.said.clear()
    assert run.stop()
    assert [line.split()[0] for line in run.said] == ["environment", "trainer", "vllm", "service"]
    assert alive([pid for family in pids.values() for pid in family]) == []
    assert all(is_free(port) for port in run.ports)
    assert not collect(run.folder).good
    assert "nothing is started" in table(collect(run.folder), run.folder, time.time())


def test_an_error_has_its_time_and_is_past_where_the_part_is_healthy(run: Run) -> None:
    run.start()
    now = float(int(time.time()))
    at = time.strftime("%H:%M:%S", time.localtime(now - 60))
    error = f"ERROR {time.strftime('%m-%d')} {at} [engine_watch.py:7] [Engine] UNHEALTHY: silent"
    (run.folder / "vllm.log").write_text(f"{error}\nRuntimeError: silent\nfine again\n")
    trouble = "Waiting for the rollout service (POST /batch: ConnectError: [Errno 111] refused)"
    (run.folder / "env.log").write_text(f"{at} WARNING atroposlib.waiting: {trouble}\n")
    (run.folder / "trainer.log").write_text(f"WARNING {at} {trouble}\n{at} {trouble}\n")
    (run.folder / "service.log").write_text(f"2026-01-02 {at},123 WARNING a.b: {trouble}\n")
    shown = table(collect(run.folder), run.folder, now).splitlines()
    assert [line for line in shown if " error of " in line] == [
        f"past error of vllm at {at} (60 s): RuntimeError: silent"
    ]
    (run.folder / "trainer.log").write_text(f"ERROR {at} the disk is full\n")
    shown = table(collect(run.folder), run.folder, now).splitlines()
    assert f"last error of trainer at {at} (60 s): ERROR {at} the disk is full" in shown


@pytest.mark.parametrize(
    ("line", "time_ago"),
    [
        ("2026-03-01 11:59:00,123 ERROR a.b: x", 60),
        ("(EngineCore pid=7) ERROR 02-28 12:00:00 [core.py:9] x", 86_400),
        ("ERROR 12-31 12:00:00 [core.py:9] x", 60 * 86_400),
        ("ERROR 13:30:00 x", 22.5 * 3600),
        ("ValueError: x", None),
        ("ERROR 13-45 12:00:00 x", None),
    ],
)
def test_the_time_of_a_line_is_the_last_one_that_fits(line: str, time_ago: float | None) -> None:
    now = datetime(2026, 3, 1, 12, 0, 0).timestamp()
    at = time_of_line(line, now)
    assert (at if at is None else now - at) == time_ago


def test_what_runs_is_not_started_twice_and_other_parts_are(run: Run) -> None:
    run.start("service")
    (keeper, *_) = run.pids()["service"]
    with pytest.raises(
        LauncherError,
        match=rf"service runs already in .* \(process {keeper}, .*scripts/stop.sh service",
    ):
        run.start()
    assert list(run.pids()) == ["service"]
    run.start("trainer")
    assert list(run.pids()) == ["service", "trainer"]
    assert run.stop("trainer")
    assert list(run.pids()) == ["service"]


def test_two_starts_at_once_do_not_meet(run: Run) -> None:
    with (
        claimed(run.folder),
        pytest.raises(LauncherError, match=r"another start\.sh or stop\.sh is at work"),
    ):
        run.start()


def test_a_part_that_ends_at_once_ends_the_start_and_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        control, "SETTLE_SECONDS", 60.0
    )  # Python needs some of it to start and fail
    with pytest.raises(
        ProcessDied,
        match=r"trainer exited with code 1 after \d+ s; log: .*trainer\.log\n(.|\n)*no rollouts for me",
    ):
        run.start("service", "vllm", "trainer", trainer_code=FAILS)
    assert run.pids() == {}
    assert run.states() == {}
    assert all(is_free(port) for port in run.ports)


def test_a_trainer_that_is_done_is_no_failure_and_one_that_failed_is(run: Run) -> None:
    run.start("service", "trainer", trainer_code=FINISHES)
    eventually(
        lambda: run.states() == {"service": "up", "trainer": "finished"},
        "the trainer has not finished",
    )
    assert collect(run.folder).good
    run.stop("trainer")
    told = run.folder / "end"
    waits = f"import os, sys, time\nprint('waiting')\nwhile not os.path.exists({str(told)!r}): time.sleep(0.05)\nsys.exit(3)"
    run.start("environment", environment_code=waits)
    told.touch()
    eventually(lambda: run.states()["environment"] == "down", "the environment is still up")
    status = collect(run.folder)
    assert not status.good
    assert [row.detail for row in status.rows if row.part == "environment"] == [
        "exited with code 3"
    ]


def test_ports_that_are_taken_are_all_named(run: Run) -> None:
    other = Run(run.folder.with_name("other"), (run.ports[0], run.ports[1], run.ports[2]))
    other.start("service", "vllm")
    try:
        with pytest.raises(LauncherError) as caught:
            run.start()
    finally:
        other.stop()
    for port, flag in zip(run.ports[:2], ("--service-port", "--vllm-port"), strict=True):
        assert f"{port} ({flag}) by python " in str(caught.value)


def test_a_part_that_ignores_sigterm_is_killed_after_its_grace_period(run: Run) -> None:
    run.start("trainer", trainer_code=STUBBORN)
    pids = run.pids()["trainer"]
    assert run.stop()
    assert "trainer      had to be killed" in run.text()
    assert alive(pids) == []


def kill_at_once(pids: set[int]) -> None:
    """`kill -9` them. None can act on another's death: they are stopped before."""
    for how in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, how)


def test_after_kill_minus_9_of_everything_the_next_start_copes(run: Run) -> None:
    """Everything that the usual pkill pattern finds; what it does not find, as vLLM's engine, lives
    on and holds its memory.
    """
    run.start()
    left = [run.folder / "vllm_bridge_config.json", run.folder / "vllm_bridge_config-9002.json"]
    for config in left:
        config.write_text("{}")
    by_hand = run.folder / "vllm_bridge_config-9003.json"
    by_hand.write_text("{}")
    living = by_hand.open()
    fcntl.flock(living, fcntl.LOCK_EX)
    pids = [pid for family in run.pids().values() for pid in family]
    orphan = int((run.folder / "vllm.log").read_text().split()[1])
    assert orphan in pids
    kill_at_once(set(pids) - {orphan})
    eventually(lambda: alive(pids) == [orphan], "not all ended")
    assert set(run.states().values()) == {"down"}

    run.said.clear()
    run.start("service")
    assert f"vllm: killed process {orphan}, which had outlived it" in run.text()
    assert "trainer: the last one (process" in run.text()
    assert not any(config.exists() for config in left)
    assert by_hand.exists(), "its server lives"
    living.close()
    eventually(lambda: alive([orphan]) == [], "the orphan lives on")
    assert run.states() == {"service": "up"}


def test_stop_after_a_kill_ends_the_orphans_too(run: Run) -> None:
    run.start("vllm")
    pids = run.pids()["vllm"]
    orphan = int((run.folder / "vllm.log").read_text().split()[1])
    kill_at_once(set(pids) - {orphan})
    eventually(lambda: alive(pids) == [orphan], "not all ended")
    assert run.stop()
    assert "vllm         had ended before: it was killed" in run.text()
    eventually(lambda: alive([orphan]) == [], "the orphan lives on")


@pytest.mark.parametrize(
    "change",
    [{"ticks": 1}, {"boot": "another boot"}],
    ids=["reused process id", "machine restarted"],
)
def test_a_process_that_only_has_the_same_id_is_never_touched(
    run: Run, change: dict[str, object]
) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        found = identify(stranger.pid)
        assert found is not None
        record = Record(
            "trainer", replace(found, **change), time.time(), str(run.folder / "trainer.log")
        )  # type: ignore[arg-type]
        run.records.write(record)
        assert run.states() == {"trainer": "down"}
        assert Part(record, run.records, run.said.append).stop() >= 0
        assert stranger.poll() is None
        stranger.kill()


def test_a_run_whose_folder_was_removed_is_shown_and_stopped(run: Run) -> None:
    run.start("service", "environment")
    pids = [pid for family in run.pids().values() for pid in family]
    shutil.rmtree(run.folder)
    status = collect(run.folder)
    assert [(row.part, row.state, row.good) for row in status.rows] == [
        ("service", "up", False),
        ("environment", "up", False),
    ]
    shown = table(status, run.folder, time.time())
    assert (
        f"the run's folder was removed; scripts/stop.sh ends it, log {run.folder}/env.log" in shown
    )
    with pytest.raises(LauncherError, match=r"service runs already .* scripts/stop\.sh service"):
        run.start("service")
    run.said.clear()
    assert stop_parts(run.folder, run.records.parts(), run.said.append)
    assert alive(pids) == []
    assert [line.split(" after ")[0] for line in run.said] == [
        "environment  ended on SIGTERM",
        "service      ended on SIGTERM",
    ]
    assert run.records.parts() == ()
    shutil.rmtree(run.folder)
    shown = table(collect(run.folder), run.folder, time.time())
    assert shown.startswith(f"{run.folder} is not there: pass --run with the folder of a run")
    assert not run.folder.exists()


def test_a_part_that_a_signal_has_stopped_is_not_up(run: Run) -> None:
    run.start("trainer")
    _, child = run.pids()["trainer"]
    os.kill(child, signal.SIGSTOP)
    eventually(lambda: run.states() == {"trainer": "stopped"}, "it counts as up")
    status = collect(run.folder)
    assert not status.good
    assert f"kill -CONT {child} lets it go on" in table(status, run.folder, time.time())
    os.kill(child, signal.SIGCONT)
    eventually(lambda: collect(run.folder).good, "it counts as stopped")


def test_a_service_that_refuses_groups_is_not_well(run: Run) -> None:
    run.start("service")
    (run.folder / "refusing").write_text("1 MB is free on its disk")
    status = collect(run.folder)
    assert not status.good
    shown = table(status, run.folder, time.time())
    assert "the service refuses new groups: 1 MB is free on its disk" in shown


def test_what_is_down_is_named_with_the_command_that_starts_it(run: Run) -> None:
    run.start("service", "environment", "trainer")
    for part in ("environment", "trainer"):
        for pid in reversed(run.pids()[part]):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: run.states()["trainer"] == "down", "the trainer lives")
    assert (
        f"to start again what is down: scripts/start.sh --run {run.folder} --resume environment trainer"
        in table(collect(run.folder), run.folder, time.time())
    )


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen(["true"])
    found: Identity | None = identify(process.pid)
    eventually(lambda: identify(process.pid) is None, "a zombie counts as alive")
    assert found is None or not found.is_alive()
    process.wait()


def test_a_record_that_cannot_be_read_is_named(run: Run) -> None:
    run.records.folder.mkdir(parents=True)
    (run.records.folder / "vllm.json").write_text("{")
    with pytest.raises(LauncherError, match=r"vllm\.json is not a record of a process"):
        collect(run.folder)
    (run.records.folder / "vllm.json").unlink()
    run.records.folder.rmdir()
    run.records.folder.write_text("")
    with pytest.raises(LauncherError, match=r"processes is a file, .*: remove the file, or give"):
        run.records.read("vllm")


def test_flags_that_the_trainer_refuses_are_named_before_anything_starts(run: Run) -> None:
    options = small_options(run.folder, run.ports, PARTS)
    options = replace(options, trainer_args=("--klcoef", "1"))
    refusal = r"refuses its flags \(--trainer-args\): unknown flag --klcoef; did you mean --kl-coef"
    with pytest.raises(LauncherError, match=refusal):
        Starter(Stack(options), run.said.append).run()
    assert run.said == ["trainer      reads its flags"]
    assert not (run.folder / "api.log").exists()
    (run.folder / "file").write_text("")
    unfit = replace(options, trainer_args=("--save-path", str(run.folder / "file" / "below")))
    with pytest.raises(LauncherError, match=r"--save-path: cannot write .*; change --save-path"):
        Starter(Stack(unfit), run.said.append).refuse_flags()
    fits = Starter(Stack(replace(options, trainer_args=("--kl-coef", "0.1"))), run.said.append)
    fits.refuse_flags()


def test_links_lead_to_the_logs_and_replace_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "trainer.log").write_text("mine")
    monkeypatch.chdir(here)
    options = replace(small_options(run.folder, run.ports, ("service", "trainer")), links=True)
    Starter(SmallStack(options), run.said.append).run()
    assert (here / "api.log").read_text().startswith("ready")
    assert (here / "trainer.log").read_text() == "mine"
    assert "trainer.log in" in run.text()


def test_a_folder_that_takes_no_links_is_named_and_the_run_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc/self")  # as a folder of another user, but for root too
    options = replace(small_options(run.folder, run.ports, ("environment",)), links=True)
    Starter(SmallStack(options), run.said.append).run()
    assert f"no links to the logs in {Path.cwd()} (" in run.text()
    assert run.states() == {"environment": "up"}


def test_a_server_that_died_beside_a_living_trainer_leaves_its_config_for_the_next_one(
    run: Run,
) -> None:
    run.start("vllm", "trainer")
    config = run.folder / "vllm_bridge_config.json"
    config.write_text("{}")
    for pid in run.pids()["vllm"]:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: run.states()["vllm"] == "down", "vLLM is still up")
    run.start("vllm")
    assert config.exists()
    assert run.states() == {"vllm": "up", "trainer": "up"}


def test_resume_starts_what_does_not_run(run: Run) -> None:
    run.start("service", "trainer", "environment")
    run.stop("environment")
    os.kill(run.pids()["trainer"][-1], signal.SIGKILL)
    eventually(lambda: run.states()["trainer"] == "down", "the trainer is still up")
    again = parse(["--resume", "--run", str(run.folder), "--no-links"])
    assert again.parts == ("environment", "trainer")
    Starter(SmallStack(again), run.said.append).run()
    assert run.states() == dict.fromkeys(("service", "environment", "trainer"), "up")
    with pytest.raises(LauncherError, match="runs already"):
        parse(["--resume", "--run", str(run.folder)])


def test_each_server_of_a_fleet_is_a_part_of_its_own(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    run = Run(tmp_path / "run", tuple(free_port() for _ in range(5)))
    try:
        run.start()
        assert list(run.pids()) == ["service", "vllm", "vllm-2", "vllm-3", "environment", "trainer"]
        assert "vllm-2       answers http://localhost:" in run.text()
        others = {part: pids for part, pids in run.pids().items() if part != "vllm-2"}
        orphan = int((run.folder / "vllm-2.log").read_text().split()[1])
        kill_at_once(set(run.pids()["vllm-2"]) - {orphan})
        eventually(lambda: run.states()["vllm-2"] == "down", "the server is still up")
        again = parse(["--resume", "--run", str(run.folder), "--no-links"])
        assert again.parts == ("vllm-2",)
        Starter(SmallStack(again), run.said.append).run()
        assert f"vllm-2: killed process {orphan}, which had outlived it" in run.text()
        assert set(run.states().values()) == {"up"}
        assert run.stop("vllm-3")
        assert {part: pids for part, pids in run.pids().items() if part != "vllm-2"} == {
            part: pids for part, pids in others.items() if part != "vllm-3"
        }
        run.said.clear()
    finally:
        run.stop()
    assert [line.split()[0] for line in run.said] == [
        "environment",
        "trainer",
        "vllm",
        "vllm-2",
        "service",
    ]


OWNS_A_SERVER = """
import pathlib, subprocess, sys, time
log = pathlib.Path(sys.argv[1]); log.parent.mkdir(exist_ok=True)
server = subprocess.Popen(["sleep", "600"], stdout=log.open("w"), start_new_session=True)
print("server", server.pid, flush=True)
time.sleep(600)
"""


def test_a_server_that_the_trainer_owns_ends_with_the_trainer_and_not_before(run: Run) -> None:
    code = OWNS_A_SERVER.replace("sys.argv[1]", repr(str(run.folder / "trainer" / "vllm.log")))
    run.start("service", "trainer", "environment", trainer_code=code)
    server = int((run.folder / "trainer.log").read_text().split()[1])
    run.stop("environment")
    run.stop("service")
    assert alive([server]) == [server]
    for pid in set(run.pids()["trainer"]) - {server}:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: run.states() == {"trainer": "down"}, "the trainer is still up")
    assert alive([server]) == [server]
    run.stop("trainer")
    eventually(lambda: alive([server]) == [], "the server lives on")
