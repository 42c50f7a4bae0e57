"""Starts on a full disk: one line, the earlier files, and an exit status that is not lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atroposlib.utils.processes import identify
from example_trainer.child_processes.guard import Ending
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.quickstart.report import write_summary
from example_trainer.launcher.quickstart.run import open_output
from example_trainer.launcher.records import Record, Records
from tests.full_disks import FullDisk, fill, limited_files, small_disk

ROOT = Path(__file__).resolve().parents[3]


def test_a_start_in_a_full_folder_is_one_line(
    full_disk: FullDisk, free_port: Callable[[], int]
) -> None:
    run = full_disk.path / "stack"
    with full_disk.full():
        status, said = started(run, free_port())
    assert status == 1
    assert f"cannot write 131 bytes to {run}/keys.env: " in said
    assert said.rstrip().endswith("which holds the run's keys; make room there")
    assert [path.name for path in run.rglob("*") if path.is_file()] == [".stack-lock"]


def test_a_part_that_a_full_disk_ends_without_a_line_in_its_log_has_its_reason(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    with small_disk(tmp_path, 0.09) as disk:
        status, said = started(disk / "run", free_port())
    assert status == 1
    assert "start: service exited with code 1" in said
    assert f"the disk of {disk}/run has " in said
    assert " bytes left: make room there" in said


def started(run: Path, port: int) -> tuple[int, str]:
    """Start nothing but the service, in a process whose standard streams are pipes."""
    command = [
        sys.executable,
        "-m",
        "example_trainer.launcher",
        "start",
        "--run",
        str(run),
        "--no-links",
        "service",
    ]
    command += ["--service-port", str(port)]
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ROLLOUT_API_KEY", "VLLM_API_KEY")
    }
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_the_record_of_a_part_stays(full_disk: FullDisk) -> None:
    records = Records(full_disk.path)
    keeper = identify(os.getpid())
    assert keeper is not None
    record = Record("service", keeper, since=1.0, log="a.log")
    records.write(record)
    with full_disk.full(), pytest.raises(OSError, match=r"service\.json"):
        records.write(replace(record, log="x" * 20_000))
    assert records.read("service") == record
    assert records.parts() == ("service",)


def test_a_quick_start_claims_no_folder_that_it_cannot_write(full_disk: FullDisk) -> None:
    with (
        full_disk.full(),
        pytest.raises(
            LauncherError, match=r"cannot write .*make room there, or give another --output"
        ),
    ):
        open_output(full_disk.path / "quick")
    open_output(full_disk.path / "quick").close()


def test_a_summary_stays(full_disk: FullDisk) -> None:
    path = full_disk.path / "summary.json"
    write_summary(path, {"steps": 1})
    with full_disk.full(), pytest.raises(OSError, match=r"summary\.json"):
        write_summary(path, {"steps": 2, "more": "x" * 20_000})
    assert json.loads(path.read_text()) == {"steps": 1}


def test_how_a_part_ended_is_kept_on_a_disk_that_filled_meanwhile(tmp_path: Path) -> None:
    with small_disk(tmp_path, 1) as disk:
        ending = Ending(disk / "trainer.exit")
        fill(disk)
        ending.write(143)
        assert json.loads((disk / "trainer.exit").read_text())["code"] == 143


def test_how_a_part_ended_is_told_if_it_cannot_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with limited_files():
        ending = Ending(tmp_path / "trainer.exit")
    ending.write(3)
    assert json.loads((tmp_path / "trainer.exit").read_text())["code"] == 3, "there is space again"
    with limited_files():
        Ending(tmp_path / "service.exit").write(4)
    assert "the command's exit status was 4" in capsys.readouterr().err
    assert not (tmp_path / "service.exit").exists()
