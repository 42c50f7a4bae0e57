"""Everything that the trainer writes, on a full disk: one line, the earlier file, no half row, no
false line.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atroposlib.wire import TrainerSession
from example_trainer import process
from example_trainer.batch.evaluations import Evaluation
from example_trainer.child_processes.ports import PortReservations
from example_trainer.child_processes.processes import ProcessError
from example_trainer.child_processes.run_keys import make_keys, read_keys
from example_trainer.errors import CheckpointError, ConfigError
from example_trainer.observe import metrics as metrics_module
from example_trainer.observe.metrics import MetricsLog
from example_trainer.training.checkpoints import Checkpoints
from example_trainer.training.runs import Run, mark_run, marked_run
from example_trainer.weight_bridge.server_record import read_record, write_record
from tests.example_trainer.training.tiny_training import load, make_start, train
from tests.full_disks import FullDisk, fill, small_disk
from vllm_patching.protocol.timeline import Timeline
from vllm_patching.server.config_file import ConfigFile, ConfigFileError

RUN = Run("a", "model", (TrainerSession(1000, 0),))
WIDE = "x" * 20_000


@pytest.fixture(autouse=True)
def _without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own threads would write in the moments in which all files of the process are limited."""
    monkeypatch.setattr(metrics_module, "_tensorboard", lambda *_: None)


@pytest.fixture
def own_log() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = before, level


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluation(number: int) -> Evaluation:
    return Evaluation(number, 1.5, 0, WIDE, 3, {"right": 1.0})


def test_rows_of_figures_and_evaluations_wait_for_space(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(full_disk.path, {})
    log.write(1, {"loss": 0.5})
    with full_disk.full():
        for step in (2, 3):
            log.write(step, {"loss": 0.5, "checksum": WIDE})
            log.write_evaluation(step, evaluation(step))
    assert rows(full_disk.path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}], "no half row"
    assert rows(full_disk.path / "evaluations.jsonl") == []
    log.write(4, {"loss": 0.25})
    log.write_evaluation(4, evaluation(4))
    log.close()
    assert [row["step"] for row in rows(full_disk.path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["step"] for row in rows(full_disk.path / "evaluations.jsonl")] == [2, 3, 4]
    refusals = [line for line in caplog.messages if "cannot write" in line]
    assert len(refusals) == 2, "one line for each file"
    assert "metrics.jsonl: " in refusals[0]
    assert "make room there: lines wait in memory" in refusals[0]


def test_a_run_that_cannot_begin_its_figures_keeps_the_earlier_ones(full_disk: FullDisk) -> None:
    file = full_disk.path / "metrics.jsonl"
    file.write_text(
        "".join(json.dumps({"step": step, "more": WIDE}) + "\n" for step in range(1, 5))
    )
    before = file.read_bytes()
    with (
        full_disk.full(),
        pytest.raises(ConfigError, match=r"cannot write metrics to --log-dir .*; make room there"),
    ):
        MetricsLog(full_disk.path, {}, first_step=3)
    assert file.read_bytes() == before
    MetricsLog(full_disk.path, {}, first_step=3).close()
    assert [row["step"] for row in rows(file)] == [1, 2, 3]


def test_the_marked_run_stays(full_disk: FullDisk) -> None:
    mark_run(RUN, full_disk.path)
    with (
        full_disk.full(),
        pytest.raises(
            CheckpointError, match=r"cannot write 20,\d+ bytes to .*run\.json: .*--save-path"
        ),
    ):
        mark_run(Run("b", WIDE, (TrainerSession(2000, 0),)), full_disk.path)
    assert marked_run(full_disk.path) == RUN
    assert [path.name for path in full_disk.path.iterdir() if path.name != "disk"] == ["run.json"]


def test_the_keys_of_a_run_stay(full_disk: FullDisk) -> None:
    keys = make_keys(full_disk.path, {}, running=False)
    long = {"VLLM_API_KEY": "k" * 20_000}
    with (
        full_disk.full(),
        pytest.raises(
            ProcessError, match=r"cannot write 20,\d+ bytes to .*keys\.env: .*make room there"
        ),
    ):
        make_keys(full_disk.path, long, running=False)
    assert read_keys(full_disk.path) == keys
    assert (full_disk.path / "keys.env").stat().st_mode & 0o777 == 0o600


def test_the_record_of_a_server_stays_and_ports_are_reserved(full_disk: FullDisk) -> None:
    folder = full_disk.path / "records"
    write_record(9001, os.getpid(), Path("first.log"), folder)
    with full_disk.full():
        with pytest.raises(OSError, match=r"No space|too large"):
            write_record(9001, os.getpid(), Path(WIDE), folder)
        with PortReservations(full_disk.path / "ports") as ports:
            assert ports.pick()
    record = read_record(9001, folder)
    assert record is not None
    assert record.log == "first.log"
    assert [path.name for path in folder.iterdir()] == ["9001.json"]


def test_a_timeline_ends_with_whole_lines(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = full_disk.path / "timeline.jsonl"
    timeline = Timeline(path, "trainer", "here")
    with full_disk.full():
        for _ in range(3):
            timeline.write("train", 0, 1, note=WIDE)
    timeline.close()
    assert [sorted(row) for row in rows(path)] == [["began", "host", "name", "pid", "role"]]
    (line,) = caplog.messages
    assert "cannot write 20052 bytes: " in line
    assert "make room before the next start" in line


def test_the_configuration_of_a_server_stays(full_disk: FullDisk) -> None:
    """The next server of a port, after one that was killed, takes its file over."""
    file = ConfigFile(full_disk.path, 9001)
    file.claim()
    assert file._descriptor is not None
    os.close(file._descriptor)
    before = file.path.read_bytes()
    with full_disk.full(), pytest.raises(ConfigFileError, match="make room there"):
        ConfigFile(full_disk.path, 9001).claim()
    assert file.path.read_bytes() == before
    assert [path.name for path in full_disk.path.glob("*.tmp")] == []


def test_a_checkpoint_that_a_full_disk_refuses_leaves_the_one_before(tmp_path: Path) -> None:
    start = make_start(tmp_path / "start")
    model, optimizer = load(start)
    with small_disk(tmp_path, 16) as disk:
        checkpoints = Checkpoints(disk, RUN)
        train(model, optimizer, 1)
        checkpoints.save(model, optimizer, {})
        before = sorted(
            (path.name, path.stat().st_mtime_ns) for path in (disk / "step_1").rglob("*")
        )
        train(model, optimizer, 2)
        fill(disk)
        with pytest.raises(
            CheckpointError,
            match=r"step_2: it needs 0\.00 GB, and 0\.00 GB are free; step_1 is untouched",
        ):
            checkpoints.save(model, optimizer, {})
        with (
            pytest.MonkeyPatch.context() as patched
        ):  # another program takes the space just after it was looked at
            usage = type("Usage", (), {"free": 1 << 40})
            patched.setattr(
                "example_trainer.training.checkpoints.shutil.disk_usage", lambda folder: usage
            )
            with pytest.raises(
                CheckpointError,
                match=r"No space left on device \(it needs 0\.00 GB\); step_1 is untouched",
            ):
                checkpoints.save(model, optimizer, {})
        assert (
            sorted((path.name, path.stat().st_mtime_ns) for path in (disk / "step_1").rglob("*"))
            == before
        )
        assert sorted(path.name for path in disk.iterdir()) == ["of_another_program", "step_1"]
        (disk / "of_another_program").unlink()
        checkpoints.save(model, optimizer, {})
        assert (disk / "step_2").is_dir()


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_no_disk_is_a_bug_of_the_trainer(capsys: pytest.CaptureFixture[str], number: int) -> None:
    def main(_: process.StopSignal) -> int:
        raise OSError(number, os.strerror(number), "/full/of/something.bin")

    assert process.run(main) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ERROR ")
    assert f"cannot write /full/of/something.bin: {os.strerror(number)}" in line
    assert "make room there" in line


@pytest.mark.usefixtures("own_log")
def test_a_thread_that_a_disk_ends_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(_: process.StopSignal) -> int:
        for error in (OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug")):
            thread = threading.Thread(target=ending_with(error), name="events")
            thread.start()
            thread.join()
        return 0

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back at the end
    assert process.run(main) == 0
    said = capfd.readouterr()
    assert "ERROR " in said.out
    assert (
        "A thread has ended (events): the disk refuses to be written: No space left on device"
        in said.out
    )
    assert "OSError" not in said.err
    assert "ValueError: a bug" in said.err


def ending_with(error: Exception) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


class FullWriter:
    """A TensorBoard whose disk is full."""

    def add_scalar(self, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    close = flush = add_scalar


def test_a_tensorboard_on_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_module, "_tensorboard", lambda *_: FullWriter())
    log = MetricsLog(tmp_path, {})
    log.write(1, {"loss": 0.5})
    log.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    (line,) = caplog.messages
    assert line.startswith(
        "No more rows for TensorBoard and W&B, metrics.jsonl only: OSError: [Errno 28] No space left"
    )


@pytest.mark.usefixtures("own_log")
def test_other_errors_of_the_system_keep_their_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(_: process.StopSignal) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    assert process.run(main) == 1
    assert "This is a bug in the trainer" in capsys.readouterr().out
