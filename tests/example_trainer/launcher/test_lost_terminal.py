"""start.sh when its terminal is closed, or the reader of its output ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_trainer.launcher.control import stop_parts
from example_trainer.launcher.records import PARTS, Records
from tests.forked_commands import ROOT

pytestmark = pytest.mark.nightly

START = """
import sys
from example_trainer.launcher import __main__ as command
from tests.example_trainer.launcher.small_stack import SmallStack
command.Stack = SmallStack
sys.exit(command.main(["start", *sys.argv[1:]]))
"""
SECONDS = 120


class Start:
    """start.sh of a stack of small programs.

    Attributes:
        run: the run's folder.
        process: the command; its output is a pipe.
    """

    def __init__(self, run: Path, ports: tuple[int, int, int]) -> None:
        self.run = run
        names = ("--service-port", "--vllm-port", "--master-port")
        flags = [word for pair in zip(names, map(str, ports), strict=True) for word in pair]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, "--run", str(run), *flags, "--cpu", "--no-links"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_to(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(f"no line with {words!r}")

    def close_output(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Start]:
    run = tmp_path / "run"
    made = Start(run, (free_port(), free_port(), free_port()))
    yield made
    made.close_output()
    made.process.kill()
    made.process.wait(SECONDS)
    stop_parts(run, Records(run).parts(), print)


def test_a_start_goes_on_without_a_reader(start: Start) -> None:
    start.read_to("service      started")
    start.close_output()
    assert start.process.wait(SECONDS) == 0
    assert Records(start.run).parts() == PARTS


def test_a_terminal_that_closes_stops_what_was_started(start: Start) -> None:
    start.read_to("environment  started")
    start.close_output()
    start.process.send_signal(signal.SIGHUP)
    assert start.process.wait(SECONDS) == 130
    assert Records(start.run).parts() == ()
