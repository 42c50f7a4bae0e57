"""Signals, exit statuses and log lines of the trainer's process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_trainer.child_processes.guard import parents
from example_trainer.errors import BridgeError, ConfigError, ModelError
from example_trainer.process import StopRequested, StopSignal, log_to_stdout, run
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    root.handlers, root.level = before, level


def raising(error: BaseException) -> Callable[[StopSignal], None]:
    def main(_: StopSignal) -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("--lr is odd"), 2, "--lr is odd"),
        (ModelError("no model\n here"), 1, "no model here"),
        (BridgeError("rank 3 is gone"), 1, "rank 3 is gone"),
        (ValueError("surprise"), 1, "ValueError: surprise"),
    ],
)
def test_errors_end_with_one_line_and_a_status(
    error: Exception, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raising(error)) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ERROR ")
    assert lines[-1].endswith(line)
    assert (len(lines) == 1) == (not isinstance(error, ValueError)), (
        "only a bug shows its traceback"
    )


def test_another_threads_failure_ends_the_waiting_of_the_main_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(stop: StopSignal) -> None:
        stop.defer()
        threading.Thread(
            target=stop.fail, args=(BridgeError("the server is gone for good"),)
        ).start()
        stop.wait(60)

    assert run(main) == 1
    assert capsys.readouterr().out.endswith("the server is gone for good\n")


def test_a_signal_comes_before_a_failure() -> None:
    stop = StopSignal()
    stop.fail(BridgeError("too late to matter"))
    stop.request(signal.SIGTERM)
    with pytest.raises(StopRequested):
        stop.check()


def test_success_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda stop: None) == 0
    assert capsys.readouterr().out == ""


def test_a_signal_while_starting_ends_it_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    passed: list[str] = []

    def main(_: StopSignal) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        passed.append("went on")

    assert run(main) == 128 + signal.SIGTERM
    assert passed == []
    assert "Stopped by SIGTERM" in capsys.readouterr().out


def test_a_signal_is_deferred_to_the_next_check() -> None:
    passed: list[str] = []

    def main(stop: StopSignal) -> None:
        stop.defer()
        os.kill(os.getpid(), signal.SIGINT)
        passed.append("the update was finished")
        stop.check()
        passed.append("went on")

    assert run(main) == 128 + signal.SIGINT
    assert passed == ["the update was finished"]


def test_after_one_signal_the_next_takes_its_usual_course() -> None:
    stop = StopSignal()
    stop.install()
    with pytest.raises(StopRequested):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_plain_lines_have_no_level_and_warnings_do(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stdout()
    logging.getLogger("example_trainer.x").info("Step %d/%d", 1, 100)
    logging.getLogger("vllm_patching.y").warning("careful")
    logging.getLogger("some.library").info("chatter")
    plain, warning = capsys.readouterr().out.splitlines()
    assert plain.endswith(" Step 1/100")
    assert "INFO" not in plain
    assert warning.startswith("WARNING ")


def test_a_rank_ends_with_its_torchrun(tmp_path: Path) -> None:
    rank = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from example_trainer.process import run
def main(stop):
    print(os.getpid(), flush=True)
    stop.wait(600)
run(main)
"""
    script = tmp_path / "rank.py"
    script.write_text(rank)
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}])"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    with subprocess.Popen(
        [sys.executable, "-c", launcher],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as torchrun:
        assert torchrun.stdout is not None
        try:
            pid = int(torchrun.stdout.readline())
            torchrun.kill()
            deadline = time.monotonic() + 60
            while pid in parents():
                assert time.monotonic() < deadline, "the rank outlived its torchrun"
                time.sleep(0.02)
        finally:
            os.killpg(torchrun.pid, signal.SIGKILL)


LEAVING_RANK = """
import atexit, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
from example_trainer.process import leave

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
if rank == 1:
    sys.stdin.read()  # rank 0 waits for this one until it has left
    leave(0)
waiting = threading.Thread(target=dist.broadcast, args=(torch.zeros(1), 1), daemon=True)
waiting.start()
atexit.register(print, "written at the end")
print("leaves")
leave(143)
"""


def test_a_rank_leaves_with_its_status_though_a_thread_waits_for_another_rank(
    tmp_path: Path,
) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LEAVING_RANK, str(rank), str(tmp_path / "store")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = {**os.environ, "WORLD_SIZE": "2"}
        return subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **pipes)

    with start(1) as other, start(0) as leaving:
        output, _ = leaving.communicate(timeout=120)
        other.communicate("", timeout=120)
    assert leaving.returncode == 143
    assert output.splitlines() == ["leaves", "written at the end"]
