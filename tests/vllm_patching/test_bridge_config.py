"""What a killed server leaves behind says whether a living trainer was attached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_patching.bridge_config import awaited_trainer, runs_here


def leave(path: Path, trainer: str, epoch: int) -> Path:
    path.write_text(json.dumps({"trainer": trainer, "epoch": epoch}))
    return path


def name_of(pid: int) -> str:
    return f"trainer {os.uname().nodename}:{pid}"


def test_a_living_trainer_is_waited_for(tmp_path: Path) -> None:
    path = leave(tmp_path / "config.json", name_of(os.getpid()), 2)
    reason = awaited_trainer(path)
    assert name_of(os.getpid()) in reason
    assert str(path) in reason, "it says what to delete"


def test_a_trainer_that_has_ended_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert runs_here(name_of(ended.pid)) is False
    assert awaited_trainer(leave(tmp_path / "config.json", name_of(ended.pid), 2)) == ""


def test_a_trainer_whose_end_nobody_has_asked_for_has_ended() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while runs_here(name_of(zombie.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{zombie.pid}").exists()
    zombie.wait()


def test_a_trainer_elsewhere_may_live(tmp_path: Path) -> None:
    assert runs_here("trainer elsewhere:1") is None
    assert awaited_trainer(leave(tmp_path / "config.json", "trainer elsewhere:1", 1)) != ""


@pytest.mark.parametrize("content", ["", "{", "[]", '{"trainer": 1}', '{"trainer": "trainer a:1", "epoch": 0}'])
def test_a_file_that_says_nothing_of_a_trainer_keeps_nobody_waiting(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert awaited_trainer(path) == ""


def test_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert awaited_trainer(tmp_path / "none.json") == ""
