"""The part of a run on a node, with real processes and without Ray."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from example_trainer.async_grpo.actor import (
    PYTHON,
    Launch,
    Look,
    NodeNeeds,
    NodeProblem,
    RoleProcess,
    writers,
)
from example_trainer.async_grpo.cluster import _RayPending, first_line
from example_trainer.child_processes.ports import PortReservations
from tests.conftest import wait_until
from tests.full_disks import limited_files


def test_an_actor_starts_looks_and_stops(tmp_path: Path) -> None:
    seat = RoleProcess("role", str(tmp_path))
    (tmp_path / ".run").write_text("elsewhere")
    report = seat.check(NodeNeeds(str(tmp_path), "mark", ports=2))
    assert (len(report.ports), report.common, report.problems) == (2, False, ())
    assert (
        seat.check(NodeNeeds(str(tmp_path), "mark", model="/no/such"))
        .problems[0]
        .startswith("model folder /no/such is not")
    )
    assert (
        "environment file"
        in seat.check(NodeNeeds(str(tmp_path), "mark", environment="x/y.py")).problems[0]
    )
    assert "has Ray" in seat.check(NodeNeeds(str(tmp_path), "mark", ray="0.1")).problems[0]
    stale = tmp_path / "role" / "old.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    code = "import sys; print(open(sys.argv[1]).read()); raise ModuleNotFoundError('no module that was wanted')"
    launch = Launch(
        (PYTHON, "-c", code, str(tmp_path / "in.txt")),
        {"X": "1"},
        {"in.txt": "hello"},
        ("role/*.json",),
    )
    seat.start(launch, 2.0, False)
    wait_until("the end", lambda: None if seat.look().code is not None else "it runs", 180)
    look = seat.look(offset=2)
    assert look.code == 1
    assert look.said.endswith("ModuleNotFoundError: no module that was wanted")
    assert look.log.startswith(b"llo\n")
    assert not stale.exists()
    assert seat.stop() == 1


def test_an_actor_finds_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    """Real processes: the pipe of the first is closed, as the kernel does when its actor is killed,
    and it takes its time.
    """
    needs = NodeNeeds(str(tmp_path), "mark")
    code = (
        "import os, pathlib, signal, sys, time\n"
        "may_end = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'told'))\n"
        "print('here', flush=True)\n"
        "while not may_end.exists(): time.sleep(0.05)\n"
    )

    def begin(number: int) -> RoleProcess:
        seat = RoleProcess("role", str(tmp_path))
        assert seat.check(needs).earlier == ()
        seat.start(Launch((PYTHON, "-c", code, str(tmp_path / f"end-{number}"))), 600.0, False)
        wait_until(
            "its word",
            lambda: None if seat.log.read_text().count("here") == number else "none yet",
            180,
        )
        return seat

    first = begin(1)
    assert first._process is not None
    running = {first._process.guard.pid, first._process.command_pid()}
    first._process.release()
    second = RoleProcess("role", str(tmp_path))
    wait_until(
        "SIGTERM", lambda: None if "told" in second.log.read_text() else "not there yet", 180
    )
    assert set(second.check(needs).earlier) == running
    (tmp_path / "end-1").touch()
    wait_until("its end", lambda: None if not second.check(needs).earlier else "it runs", 180)

    third = begin(2)
    assert third._process is not None
    assert len(second.check(replace(needs, end_earlier=True)).earlier) == 2
    wait_until("its end", lambda: None if not writers(second.log) else "it runs", 180)
    third._process.stop()


def test_a_full_disk_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    seat = RoleProcess("role", str(tmp_path))
    with limited_files(), pytest.raises(NodeProblem) as caught:
        seat.start(Launch((PYTHON, "-c", "pass"), files={"in.txt": "hello"}), 1.0, False)
    assert str(caught.value) == (
        f"it cannot be started, with its files and its log in {tmp_path}: File too large ({tmp_path}/in.txt); "
        "free space there, or give another logging.folder"
    )
    assert not list(tmp_path.glob("*in.txt*"))


def test_a_log_that_cannot_be_written_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    seat = RoleProcess("role", str(tmp_path))
    seat.log.mkdir(parents=True)
    with pytest.raises(
        NodeProblem,
        match=r"its log in .*: Is a directory .*; make it writable for who runs Ray there",
    ):
        seat.start(Launch((PYTHON, "-c", "pass")), 1.0, False)
    seat.log.rmdir()
    seat.log.parent.rmdir()
    seat.log.parent.touch()
    (said,) = seat.check(NodeNeeds(str(tmp_path), "mark")).problems
    assert said.startswith(f"the run's folder {tmp_path} cannot be written: ")
    assert said.endswith(
        "; make it writable for who runs Ray there, or give another logging.folder"
    )


def test_a_log_that_fails_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = RoleProcess("role", str(tmp_path))
    found, failures = seat.look(), [OSError(errno.EBADF, "Bad file descriptor")]

    def look(url: str, offset: int) -> Look:
        if failures:
            raise failures.pop()
        return found

    monkeypatch.setattr(seat, "_look", look)
    assert seat.look() is found
    failures.extend(OSError(errno.EIO, "I/O error") for _ in range(2))
    with pytest.raises(NodeProblem, match="cannot be read: I/O error; look at that disk"):
        seat.look()


def test_no_free_port_is_one_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PortReservations, "take", lambda *_: False)
    (said,) = (
        RoleProcess("role", str(tmp_path)).check(NodeNeeds(str(tmp_path), "mark", ports=1)).problems
    )
    assert said.startswith("it gets no port: found no free TCP port between ")
    assert "(ss -ltn)" in said
    assert RoleProcess("role", str(tmp_path)).check(NodeNeeds(str(tmp_path), "mark")).problems == ()


def test_what_an_actor_cannot_do_comes_through_ray_as_it_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray")

    def fail(*_: object, **__: object) -> None:
        raise error.as_instanceof_cause()

    monkeypatch.setattr(ray, "get", fail)
    error = ray.exceptions.RayTaskError("start", "Traceback: ...", NodeProblem("no space"))
    with pytest.raises(NodeProblem, match=r"^no space$"):
        _RayPending(None).get()
    error = ray.exceptions.RayTaskError("start", "Traceback: ...", KeyError("a bug"))
    with pytest.raises(KeyError, match="Traceback"):
        _RayPending(None).get()


def test_of_what_ray_says_is_kept_what_tells_the_cause() -> None:
    assert first_line(ValueError("The actor died.\n\tclass_name: Keeper")) == "The actor died."
    failed = "The actor died because of an error raised in its creation task, ray::trainer\n  File a\nModuleNotFoundError: x\n"
    assert first_line(ValueError(failed)) == "its actor could not be made: ModuleNotFoundError: x"
    assert first_line(ValueError()) == "ValueError"


def test_a_log_that_is_removed_before_it_is_shown_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    role = RoleProcess("role", str(tmp_path))
    role.check(NodeNeeds(str(tmp_path), "mark"))
    role.start(Launch((PYTHON, "-c", "pass")), 2.0, False)
    assert role._process is not None
    role.log.unlink()
    role._show(role._process)
    assert f"role: its log {role.log} cannot be shown (No such file or directory)" in caplog.text
    role.stop()
