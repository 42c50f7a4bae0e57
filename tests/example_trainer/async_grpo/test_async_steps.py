"""The steps on the driver's terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_trainer.async_grpo.driver import StepFollower
from example_trainer.observe.metrics import step_line
from tests.example_trainer.async_grpo.fake_cluster import Bench
from tests.example_trainer.observe.test_metrics import row_of_a_step


def line(step: int, **figures: object) -> bytes:
    return f"12:00:00 INFO {step_line(step, 9, row_of_a_step(**figures))}\n".encode()


def steps(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("[Async] step ")]


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_the_driver_shows_each_step_that_the_trainer_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench = Bench(tmp_path)
    log = bench.driver._settings.folder / "logs" / "trainer.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    bench.turn(10)
    append(log, b"Registered with the rollout service\n" + line(1, success_rate=0.25))
    bench.turn(1)
    append(log, line(2))
    bench.turn(2)
    assert steps(caplog) == [
        "[Async] step 1/9  reward 0.500  success 25.0 %  2 tok/s  staleness 1.0 (max 2)",
        "[Async] step 2/9  reward 0.500  2 tok/s  staleness 1.0 (max 2)",
    ]


def test_lines_may_come_in_pieces_and_from_every_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log = tmp_path / "trainer.log"
    follower = StepFollower(log)
    follower.report()
    whole = line(1) + line(1) + line(2)
    for at in range(0, len(whole), 50):
        append(log, whole[at : at + 50])
        follower.report()
    assert [message[:16] for message in steps(caplog)] == ["[Async] step 1/9", "[Async] step 2/9"]


def test_steps_of_an_earlier_run_are_not_repeated_and_a_new_file_is_read_from_its_begin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log = tmp_path / "trainer.log"
    append(log, line(1) + line(2))
    follower = StepFollower(log)
    follower.report()
    assert steps(caplog) == []
    append(log, line(3))
    follower.report()
    log.write_bytes(line(1))
    follower.report()
    assert [message[:16] for message in steps(caplog)] == ["[Async] step 3/9", "[Async] step 1/9"]


def test_an_unreadable_log_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "trainer.log"
    follower = StepFollower(log)
    log.mkdir()
    (log / "file").touch()
    for _ in range(3):
        follower.report()
    assert [message for message in caplog.messages if "steps are not shown here" in message] == [
        f"[Async] steps are not shown here: {log} cannot be read: Is a directory"
    ]
