"""The records of a run's processes, as start.sh writes them and the page reads them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atroposlib.dashboard.live.stack import RunProcess, read_processes
from atroposlib.utils.processes import Identity, boot_id, identify
from example_trainer.launcher.records import Exit, Record, Records


def write(
    folder: Path, part: str, keeper: Identity, port: int = 0, end: dict[str, Any] | None = None
) -> None:
    records = Records(folder)
    records.write(Record(part, keeper, since=1.0, log="log", port=port))
    if end is not None:
        records.exit_file(part).write_text(json.dumps(end))
        assert records.exit_of(part) == Exit(**end), "as the keeper writes it"


def myself() -> Identity:
    found = identify(os.getpid())
    assert found is not None
    return found


def test_a_process_exists_until_it_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        keeper = identify(process.pid)
        assert keeper is not None
        write(tmp_path, "vllm-2", keeper, 9001)
        assert read_processes(tmp_path) == [RunProcess("vllm-2", 9001, exists=True)]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        (found,) = read_processes(tmp_path)
        assert found == RunProcess("vllm-2", 9001, exists=False)
        assert found.code is None, "nothing recorded its end"
    finally:
        process.kill()


def test_a_recorded_end_is_told(tmp_path: Path) -> None:
    gone = Identity(myself().pid, 1, boot_id())
    write(tmp_path, "trainer", gone, end={"code": 137, "at": 5.0})
    write(tmp_path, "environment", gone, end={"code": 0, "at": 4.0})
    assert [(one.part, one.describe_end(), one.ended) for one in read_processes(tmp_path)] == [
        ("environment", "ended with status 0", 4.0),
        ("trainer", "killed by signal 9", 5.0),
    ]
    write(tmp_path, "trainer", myself(), end={"code": 137, "at": 5.0})
    assert read_processes(tmp_path)[1] == RunProcess("trainer", exists=True), (
        "the end of an earlier process of this part"
    )


def test_another_boot_or_machine_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, "trainer", Identity(myself().pid, myself().ticks, "another boot"))
    assert read_processes(tmp_path) == [RunProcess("trainer", exists=None)]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"keeper": 3}', '{"keeper": {"pid": "x", "ticks": 1, "boot": "b"}}', "\x00"],
)
def test_what_is_no_record_is_left_out(text: str, tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "trainer.json").write_text(text)
    assert read_processes(tmp_path) == []
    assert read_processes(tmp_path / "nowhere") == []
