"""What runs on a node, with real processes and without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from example_trainer.async_grpo.actor import NodeNeeds, RoleProcess, writers
from example_trainer.async_grpo.launch import PYTHON, Launch
from tests.conftest import wait_until


def test_an_actor_starts_looks_and_stops(tmp_path: Path) -> None:
    seat = RoleProcess("role", str(tmp_path))
    (tmp_path / ".run").write_text("elsewhere")
    report = seat.check(NodeNeeds(str(tmp_path), "mark", ports=2))
    assert (len(report.ports), report.common, report.problems) == (2, False, ())
    assert seat.check(NodeNeeds(str(tmp_path), "mark", model="/no/such")).problems[0].startswith("model folder /no/such is not")
    assert "environment file" in seat.check(NodeNeeds(str(tmp_path), "mark", environment="x/y.py")).problems[0]
    assert "has Ray" in seat.check(NodeNeeds(str(tmp_path), "mark", ray="0.1")).problems[0]
    stale = tmp_path / "role" / "old.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    code = "import sys; print(open(sys.argv[1]).read()); raise ModuleNotFoundError('no module that was wanted')"
    launch = Launch((PYTHON, "-c", code, str(tmp_path / "in.txt")), {"X": "1"}, {"in.txt": "hello"}, ("role/*.json",))
    seat.start(launch, 2.0, False)
    wait_until("the end", lambda: None if seat.look().code is not None else "it runs", 180)
    look = seat.look(offset=2)
    assert look.code == 1
    assert look.said.endswith("ModuleNotFoundError: no module that was wanted")
    assert look.log.startswith(b"llo\n")
    assert not stale.exists()
    assert seat.stop() == 1


def test_an_actor_finds_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    """Real processes: the pipe of the first is closed, as the kernel does when its actor is killed, and it takes its time."""
    needs = NodeNeeds(str(tmp_path), "mark")
    code = (
        "import pathlib, signal, sys, time\n"
        "may_end = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
        "print('here', flush=True)\n"
        "while not may_end.exists(): time.sleep(0.05)\n"
    )

    def begin(number: int) -> RoleProcess:
        seat = RoleProcess("role", str(tmp_path))
        assert seat.check(needs).earlier == ()
        seat.start(Launch((PYTHON, "-c", code, str(tmp_path / f"end-{number}"))), 600.0, False)
        wait_until("its word", lambda: None if seat.log.read_text().count("here") == number else "none yet", 180)
        return seat

    first = begin(1)
    assert first._process is not None
    running = {first._process.guard.pid, first._process.command_pid()}
    first._process.release()
    second = RoleProcess("role", str(tmp_path))
    wait_until("SIGTERM", lambda: None if "told" in second.log.read_text() else "not there yet", 180)
    assert set(second.check(needs).earlier) == running
    (tmp_path / "end-1").touch()
    wait_until("its end", lambda: None if not second.check(needs).earlier else "it runs", 180)

    third = begin(2)
    assert third._process is not None
    assert len(second.check(replace(needs, end_earlier=True)).earlier) == 2
    wait_until("its end", lambda: None if not writers(second.log) else "it runs", 180)
    third._process.stop()
