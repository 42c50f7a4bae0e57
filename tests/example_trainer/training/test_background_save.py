"""Checkpoints that are written while training goes on: what they hold, what waits for what, and
what is left when all ends.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.errors import CheckpointError
from example_trainer.models import Decoder, load_model
from example_trainer.training import checkpoints as checkpointing
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.runs import SavedStep, choose_start, steps_in
from tests.example_trainer.training import killed_saver
from tests.example_trainer.training.killed_saver import RUN
from tests.example_trainer.training.tiny_training import give_gradient, load, make_start, train
from tests.forked_commands import run_command

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 60
"""After which a test that waits for an event has failed."""


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return make_start(tmp_path / "start")


class Gate:
    """Holds a write up where the optimizer's state begins."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.error: Exception | None = None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, write = Gate(), checkpointing.write_safetensors

    def wait_and_write(*arguments: Any, **options: Any) -> None:
        gate.reached.set()
        assert gate.opened.wait(SECONDS)
        if gate.error is not None:
            raise gate.error
        write(*arguments, **options)

    monkeypatch.setattr(checkpointing, "write_safetensors", wait_and_write)
    yield gate
    gate.opened.set()


def state_of(optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}


def assert_holds(checkpoint: Path, state: dict[str, torch.Tensor]) -> None:
    saved = load_file(checkpoint / "trainer_state" / "optimizer.safetensors")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in state.items())
    for name, parameter in load_model(str(checkpoint), torch.bfloat16).named_parameters():
        assert torch.equal(parameter, state[f"master.{name}"].bfloat16()), name


@pytest.mark.parametrize("offload", [False, True])
def test_training_goes_on_while_a_step_is_written_as_it_was(
    start: Path, tmp_path: Path, gate: Gate, offload: bool
) -> None:
    model, optimizer = load(start, offload)
    train(model, optimizer, 1)
    before = state_of(optimizer)
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    folder = checkpoints.begin(model, optimizer, {})
    train(model, optimizer, 4)
    assert gate.reached.wait(SECONDS)
    assert not checkpoints.written()
    assert checkpoints.writing
    assert steps_in(tmp_path / "out") == {}, "what has the name is complete"
    gate.opened.set()
    checkpoints.wait()
    assert checkpoints.written()
    assert_holds(folder, before)
    assert not torch.equal(
        before["master.model.norm.weight"], optimizer.masters["model.norm.weight"]
    )


def test_without_room_for_a_copy_the_next_step_waits_until_it_is_written(
    start: Path,
    tmp_path: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(checkpointing, "free_host_memory", lambda: (1000, 10**9))
    model, optimizer = load(start)
    train(model, optimizer, 1)
    before = state_of(optimizer)
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    folder = checkpoints.begin(model, optimizer, {})
    give_gradient(model, optimizer)
    waits, waiting = optimizer.wait_for_readers, threading.Event()

    def note_and_wait() -> None:
        waiting.set()
        waits()

    optimizer.wait_for_readers = note_and_wait
    stepping = threading.Thread(target=optimizer.step, daemon=True)
    stepping.start()
    assert waiting.wait(SECONDS)
    assert gate.reached.wait(SECONDS)
    assert stepping.is_alive()
    assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state_dict().items())
    gate.opened.set()
    stepping.join(SECONDS)
    checkpoints.wait()
    assert optimizer.steps == 2
    assert_holds(folder, before)
    assert "written without a copy" in caplog.text


@pytest.mark.parametrize("asked", ["written", "wait", "begin"])
def test_a_write_that_fails_is_told_once_and_leaves_the_one_before(
    start: Path, tmp_path: Path, gate: Gate, asked: str
) -> None:
    model, optimizer = load(start)
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    train(model, optimizer, 1)
    before = state_of(optimizer)
    gate.opened.set()
    whole = checkpoints.save(model, optimizer, {})
    train(model, optimizer, 2)
    gate.error = OSError(28, "No space left on device")
    checkpoints.begin(model, optimizer, {})
    assert checkpoints.last == 2
    train(model, optimizer, 3)
    ask: dict[str, Callable[[], object]] = {
        "written": lambda: until_written(checkpoints),
        "wait": checkpoints.wait,
        "begin": lambda: checkpoints.begin(model, optimizer, {}),
    }
    with pytest.raises(
        CheckpointError,
        match=r"could not write .*step_2: No space left on device \(it needs .*\); step_1 is untouched",
    ):
        ask[asked]()
    assert checkpoints.last == 1
    assert checkpoints.written()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step_1"]
    assert_holds(whole, before)
    gate.error = None
    assert checkpoints.save(model, optimizer, {}).name == "step_3"


def until_written(checkpoints: Checkpoints) -> None:
    asked = threading.Event()
    while not checkpoints.written():
        assert not asked.wait(0.01)


def test_an_error_that_nobody_thought_of_is_raised_too(
    start: Path, tmp_path: Path, gate: Gate
) -> None:
    model, optimizer = load(start)
    gate.error = ZeroDivisionError("a bug")
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    checkpoints.begin(model, optimizer, {})
    gate.opened.set()
    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()


def test_one_is_written_at_a_time_and_their_memory_is_taken_once(
    start: Path, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = checkpointing.HostArena
    monkeypatch.setattr(
        checkpointing, "HostArena", lambda *arguments: made.append(real(*arguments)) or made[-1]
    )
    model, optimizer = load(start)
    checkpoints = Checkpoints(tmp_path, RUN, keep_states=None)
    checkpoints.begin(model, optimizer, {})
    train(model, optimizer, 1)
    assert gate.reached.wait(SECONDS)
    second = threading.Thread(target=checkpoints.begin, args=(model, optimizer, {}), daemon=True)
    second.start()
    assert list(steps_in(tmp_path)) == []
    gate.opened.set()
    second.join(SECONDS)
    checkpoints.wait()
    assert list(steps_in(tmp_path)) == [0, 1]
    assert len(made) == 1


def test_a_write_that_stands_still_is_given_up(
    start: Path,
    tmp_path: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = load(start)
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    checkpoints.begin(model, optimizer, {})
    assert gate.reached.wait(SECONDS)
    monkeypatch.setattr(checkpointing, "STALLED_SECONDS", 0.5)
    with pytest.raises(CheckpointError, match="writing step_0 has made no progress for 0 s"):
        checkpoints.wait()


def test_closing_lets_a_write_end_and_logs_what_goes_wrong(
    start: Path, tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = load(start)
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    checkpoints.begin(model, optimizer, {})
    gate.opened.set()
    checkpoints.close()
    assert list(steps_in(tmp_path / "out")) == [0]
    train(model, optimizer, 1)
    gate.error = OSError(5, "Input/output error")
    checkpoints.begin(model, optimizer, {})
    checkpoints.close()
    assert "Checkpoint step_1 was not written: could not write" in caplog.text


class TestKeeping:
    def save(
        self, checkpoints: Checkpoints, model: Decoder, optimizer: MasterAdamW, *steps: int
    ) -> None:
        for step in steps:
            train(model, optimizer, step)
            checkpoints.save(model, optimizer, {})

    def test_older_ones_of_this_run_alone_are_removed_whole(
        self, start: Path, tmp_path: Path
    ) -> None:
        other = Checkpoints(tmp_path, RUN)
        self.save(other, *load(start), 9)
        fresh = Checkpoints(tmp_path, type(RUN)("b", "model", RUN.lives), keep_states=1, keep=2)
        self.save(fresh, *load(start), 1, 2, 3, 4)
        kept = {
            step: (path / "trainer_state").is_dir() for step, path in steps_in(tmp_path).items()
        }
        assert kept == {3: False, 4: True, 9: True}
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    def test_what_a_server_may_be_started_on_again_is_kept(
        self, start: Path, tmp_path: Path
    ) -> None:
        checkpoints = Checkpoints(
            tmp_path, RUN, keep_states=None, keep=1, in_use=lambda step: step % 3 == 0
        )
        model, optimizer = load(start)
        self.save(checkpoints, model, optimizer, 2, 3, 4)
        assert list(steps_in(tmp_path)) == [3, 4]
        self.save(checkpoints, model, optimizer, 5, 6, 7)
        assert list(steps_in(tmp_path)) == [6, 7]

    def test_the_checkpoint_that_a_model_was_read_from_may_go(
        self, start: Path, tmp_path: Path
    ) -> None:
        self.save(Checkpoints(tmp_path, RUN), *load(start), 1)
        model, optimizer = load(tmp_path / "step_1")
        load_state(SavedStep.read(tmp_path / "step_1"), optimizer)
        self.save(
            Checkpoints(tmp_path, RUN, keep_states=None, keep=1, last=1), model, optimizer, 2, 3
        )
        assert list(steps_in(tmp_path)) == [3]
        assert (tmp_path / "step_3" / "config.json").read_bytes() == (
            start / "config.json"
        ).read_bytes()


STEPS = 4


def test_wherever_a_writer_is_killed_the_newest_checkpoint_goes_on_to_the_same_weights(
    start: Path, tmp_path: Path
) -> None:
    """Real processes and SIGKILL, at points spread over every write, fsync, rename and removal of
    the run.
    """

    def run(*points: int) -> list[tuple[str, int]]:
        command = [
            sys.executable,
            "-m",
            killed_saver.__name__,
            str(start),
            str(tmp_path),
            str(STEPS),
            *map(str, points),
        ]
        done = run_command(command, seconds=240)
        assert done.returncode == 0, done.stdout[-3000:]
        found: list[tuple[str, int]] = json.loads(done.stdout.splitlines()[-1])
        return found

    ((counted, status),) = run(0)
    assert status == 0
    operations = int(counted)
    assert operations > 60
    assert list(steps_in(tmp_path / "0")) == [STEPS - 1, STEPS]
    points = sorted({1 + number * (operations - 1) // 39 for number in range(40)})
    assert [status for _, status in run(*points)] == [-signal.SIGKILL] * len(points)
    _, expected = load(start)
    load_state(SavedStep.read(tmp_path / "0" / f"step_{STEPS}"), expected)
    reached = set()
    for point in points:
        folder = tmp_path / str(point)
        for path in steps_in(folder).values() if folder.exists() else ():
            load_model(str(path), torch.bfloat16)
        chosen = choose_start("auto", folder, "model", 2000)
        reached.add(chosen.saved.step if chosen.saved else 0)
        model, optimizer = load(chosen.checkpoint or start)
        if chosen.saved:
            load_state(chosen.saved, optimizer)
        train(model, optimizer, STEPS)
        for key, tensor in expected.state_dict().items():
            assert torch.equal(tensor, optimizer.state_dict()[key]), (point, key)
        Checkpoints(folder, chosen.run, keep_states=None).save(model, optimizer, {})
        assert not list(folder.glob(".*")), "what was left unfinished is removed"
    assert reached == set(range(STEPS + 1))
