"""A folder called step_N is always a whole checkpoint, from which training goes on exactly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atroposlib.wire import TrainerSession
from example_trainer.errors import CheckpointError
from example_trainer.models import load_model
from example_trainer.training import checkpoints as checkpointing
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.training.runs import Run, SavedStep, TrainedBatch, mark_run, steps_in
from tests.example_trainer.training.tiny_training import load, make_start, train
from tests.forked_commands import run_command

RUN = Run("a", "model", (TrainerSession(1000, 0),))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A checkpoint to begin with."""
    return make_start(tmp_path / "start")


def test_a_checkpoint_holds_the_weights_that_are_served(start: Path, tmp_path: Path) -> None:
    model, optimizer = load(start)
    train(model, optimizer, 2)
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    folder = checkpoints.begin(
        model, optimizer, {"lr": 0.02}, TrainedBatch(7, 99, {"a": 4}), [TrainedBatch(6, 99)]
    )
    checkpoints.wait()
    assert folder == tmp_path / "out" / "step_2"
    again = load_model(str(folder), torch.bfloat16)
    for (name, one), (_, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    assert (folder / "config.json").read_bytes() == (start / "config.json").read_bytes()
    state = json.loads((folder / "trainer_state" / "trainer.json").read_text())
    run = {"name": "a", "model": "model", "lives": [[1000, 0]]}
    batches = {
        "batch": {"id": 7, "uuid": 99, "positions": {"a": 4}},
        "unacknowledged": [{"id": 6, "uuid": 99, "positions": None}],
    }
    plain = {"step": 2, "updates": 2, "run": run, "config": {"lr": 0.02}, "layout": "one rank"}
    assert state == plain | batches
    saved = SavedStep.read(folder)
    assert saved == SavedStep(
        folder, 2, RUN, 2, TrainedBatch(7, 99, {"a": 4}), (TrainedBatch(6, 99),), "one rank"
    )
    assert saved.layout_change("one rank") == ""
    change = saved.layout_change("FSDP2 over 2 ranks")
    assert change.startswith(f"{folder} was saved by one rank, and this trainer has FSDP2 over 2")


def test_saving_does_not_touch_the_model(start: Path, tmp_path: Path) -> None:
    """The parameters may be the server's memory, and be a version behind when an update has failed."""
    model, optimizer = load(start)
    tokens = torch.arange(9)[None]
    model.logits(tokens).float().sum().backward()
    optimizer.step()  # not written into the model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    folder = Checkpoints(tmp_path / "out", RUN).save(model, optimizer, {})
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    saved = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(saved, optimizer.masters["model.norm.weight"].bfloat16())
    assert not torch.equal(saved, before["model.norm.weight"])


@pytest.mark.parametrize("updates", [1, 3])
def test_resuming_is_exact(start: Path, tmp_path: Path, updates: int) -> None:
    model, optimizer = load(start)
    train(model, optimizer, 3, updates)
    folder = Checkpoints(tmp_path / "out", RUN).save(model, optimizer, {})
    train(model, optimizer, 5, updates)
    resumed, continued = load(folder)
    load_state(SavedStep.read(folder), continued)
    assert (continued.steps, continued.updates) == (3, 3 * updates)
    train(resumed, continued, 5, updates)
    assert (
        (continued.steps, continued.updates)
        == (optimizer.steps, optimizer.updates)
        == (5, 5 * updates)
    )
    for key, tensor in optimizer.state_dict().items():
        assert torch.equal(tensor, continued.state_dict()[key]), key


def test_only_the_newest_keep_their_optimizer_state(start: Path, tmp_path: Path) -> None:
    model, optimizer = load(start)
    checkpoints = Checkpoints(tmp_path, RUN, keep_states=2)
    for step in (1, 2, 10):
        train(model, optimizer, step)
        checkpoints.save(model, optimizer, {})
    assert list(steps_in(tmp_path)) == [1, 2, 10]
    assert [(path / "trainer_state").is_dir() for path in steps_in(tmp_path).values()] == [
        False,
        True,
        True,
    ]
    assert all((path / "model.safetensors").is_file() for path in steps_in(tmp_path).values())


def test_states_of_none_or_of_all_are_kept(start: Path, tmp_path: Path) -> None:
    for keep, kept in ((0, []), (None, [1, 2])):
        model, optimizer = load(start)
        checkpoints = Checkpoints(tmp_path / str(keep), RUN, keep_states=keep)
        for step in (1, 2):
            train(model, optimizer, step)
            checkpoints.save(model, optimizer, {}, TrainedBatch(step, 99))
        steps = steps_in(tmp_path / str(keep))
        assert [step for step, path in steps.items() if (path / "trainer_state").exists()] == kept
        assert [SavedStep.read(path).batch for path in steps.values()] == [
            TrainedBatch(1, 99),
            TrainedBatch(2, 99),
        ]
        assert all((path / "model.safetensors").is_file() for path in steps.values())


def test_without_a_state_training_goes_on_from_the_weights_and_says_so(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = load(start)
    train(model, optimizer, 3)
    folder = Checkpoints(tmp_path / "out", RUN, keep_states=0).save(model, optimizer, {})
    resumed, continued = load(folder)
    load_state(SavedStep.read(folder), continued)
    assert (continued.steps, continued.updates) == (3, 0), (
        "the count that corrects the moments begins with them"
    )
    assert f"{folder} keeps no optimizer state: training goes on from its weights" in caplog.text
    trained = dict(model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in resumed.named_parameters())
    train(resumed, continued, 5)
    assert (continued.steps, continued.updates) == (5, 2)


def test_weights_for_a_server_do_not_wait_for_states_and_get_theirs_later(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of step 1 is on its way to the disk while the weights of step 2 are written for a
    server to load.
    """
    model, optimizer = load(start)
    train(model, optimizer, 1)
    writing, go_on = threading.Event(), threading.Event()
    write = checkpointing.write_safetensors

    def slowly(path: Path, *rest: Any, **options: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        write(path, *rest, **options)

    monkeypatch.setattr(checkpointing, "write_safetensors", slowly)
    checkpoints = Checkpoints(tmp_path / "out", RUN, keep_states=None)
    checkpoints.begin(model, optimizer, {})
    assert writing.wait(60)
    train(model, optimizer, 2)
    folder = checkpoints.save_weights(model, optimizer, {}, TrainedBatch(7, 99))
    assert checkpoints.writing
    assert list(steps_in(tmp_path / "out")) == [2], "step 1 is not whole yet"
    assert not (folder / "trainer_state").exists()
    assert SavedStep.read(folder) == SavedStep(
        folder, 2, RUN, 2, TrainedBatch(7, 99), layout="one rank"
    )
    served, trained = load_model(str(folder), torch.bfloat16), dict(model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in served.named_parameters())
    files = {
        path.name: path.stat().st_ino for path in folder.iterdir() if path.name != "trainer.json"
    }
    go_on.set()
    checkpoints.begin(model, optimizer, {}, TrainedBatch(7, 99))
    checkpoints.wait()
    assert list(steps_in(tmp_path / "out")) == [1, 2]
    assert {
        path.name: path.stat().st_ino for path in folder.iterdir() if path.is_file()
    } == files, "written once"
    assert SavedStep.read(folder) == SavedStep(
        folder, 2, RUN, 2, TrainedBatch(7, 99), layout="one rank"
    )
    _, continued = load(folder)
    load_state(SavedStep.read(folder), continued)
    assert all(
        torch.equal(tensor, continued.state_dict()[key])
        for key, tensor in optimizer.state_dict().items()
    )
    assert not list((tmp_path / "out").glob(".*"))


def test_the_newest_state_stays_while_later_weights_have_none(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--keep-checkpoints 1: step 2 is complete when step 3 has its weights alone, and a kill may
    come now.
    """
    model, optimizer = load(start)
    checkpoints = Checkpoints(tmp_path, RUN, keep=1, in_use=lambda step: step == 3)
    train(model, optimizer, 1)
    checkpoints.save(model, optimizer, {})
    train(model, optimizer, 2)
    writing, go_on = threading.Event(), threading.Event()
    write = checkpointing.write_safetensors

    def slowly(*arguments: Any, **options: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(checkpointing, "write_safetensors", slowly)
    checkpoints.begin(model, optimizer, {})
    assert writing.wait(60)
    train(model, optimizer, 3)
    checkpoints.save_weights(model, optimizer, {})
    go_on.set()
    checkpoints.wait()
    assert list(steps_in(tmp_path)) == [2, 3]
    assert (tmp_path / "step_2" / "trainer_state" / "trainer.json").is_file()
    checkpoints.begin(model, optimizer, {})
    checkpoints.wait()
    assert list(steps_in(tmp_path)) == [3]


def test_weights_for_a_server_are_the_whole_checkpoint_if_no_state_is_kept(
    start: Path, tmp_path: Path
) -> None:
    model, optimizer = load(start)
    train(model, optimizer, 2)
    checkpoints = Checkpoints(tmp_path, RUN, keep_states=0)
    folder = checkpoints.save_weights(model, optimizer, {})
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert checkpoints.begin(model, optimizer, {}) == folder
    assert checkpoints.written()
    assert checkpoints.last == 2
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before


def test_a_checkpoint_of_an_earlier_run_is_replaced(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for lr in (1.0, 2.0):
        model, optimizer = load(start)
        train(model, optimizer, 1)
        Checkpoints(tmp_path / "out", RUN).save(model, optimizer, {"lr": lr})
    assert "Replacing checkpoint" in caplog.text
    assert json.loads((tmp_path / "out" / "step_1" / "trainer_state" / "trainer.json").read_text())[
        "config"
    ] == {"lr": 2.0}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step_1"]


def test_what_a_dead_process_left_is_removed_and_never_resumed_from(
    start: Path, tmp_path: Path
) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    draft = tmp_path / "out" / f".step_9.draft-{dead.stdout.strip()}"
    (draft / "trainer_state").mkdir(parents=True)
    (draft / "trainer_state" / "trainer.json").write_text("{}")
    assert not steps_in(tmp_path / "out")
    model, optimizer = load(start)
    train(model, optimizer, 1)
    Checkpoints(tmp_path / "out", RUN).save(model, optimizer, {})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step_1"]


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint_whole(
    start: Path, tmp_path: Path
) -> None:
    """The limit on file size stands for the end of the disk: the write of the optimizer state fails
    half-way.
    """
    model, optimizer = load(start)
    checkpoints = Checkpoints(tmp_path / "out", RUN)
    train(model, optimizer, 1)
    checkpoints.save(model, optimizer, {})
    train(model, optimizer, 2)
    before = sorted(
        (path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out" / "step_1").rglob("*")
    )
    size = (tmp_path / "out" / "step_1" / "trainer_state" / "optimizer.safetensors").stat().st_size
    script = f"""
import resource, signal, sys
sys.path[0] = {str(Path(__file__).resolve().parents[3])!r}
from pathlib import Path
import torch
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.models import load_model
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.runs import SavedStep
folder = Path({str(tmp_path / "out")!r})
model = load_model(str(folder / "step_1"), torch.bfloat16)
optimizer = MasterAdamW(model, lr=0.02)
load_state(SavedStep.read(folder / "step_1"), optimizer)
optimizer.steps = 2
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 100}, {size - 100}))
try:
    Checkpoints(folder, SavedStep.read(folder / "step_1").run, last=1).save(model, optimizer, {{}})
except Exception as error:
    print(type(error).__name__, error)
"""
    done = run_command([sys.executable, "-c", script], program="light")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(
        f"CheckpointError could not write checkpoint {tmp_path / 'out' / 'step_2'}: "
    )
    assert "File too large" in done.stdout
    assert "step_1 is untouched; make room there, or change --save-path" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step_1"]
    assert (
        sorted(
            (path.name, path.stat().st_mtime_ns)
            for path in (tmp_path / "out" / "step_1").rglob("*")
        )
        == before
    )


def test_too_little_room_is_noticed_before_writing(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = load(start)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(
        "example_trainer.training.checkpoints.shutil.disk_usage", lambda folder: usage
    )
    with pytest.raises(
        CheckpointError,
        match=r"step_0: it needs 0\.00 GB, and 0\.00 GB are free; there was none before it",
    ):
        Checkpoints(tmp_path / "out", RUN).save(model, optimizer, {})
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(start: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, optimizer = load(start)
    with pytest.raises(
        CheckpointError, match=r"could not write checkpoint .*file/out/step_0: Not a directory"
    ):
        Checkpoints(tmp_path / "file" / "out", RUN).save(model, optimizer, {})


def test_a_run_prunes_its_own_optimizer_states_alone(start: Path, tmp_path: Path) -> None:
    """A fresh run in a used folder counts from 1, below what the run before it has left."""
    model, optimizer = load(start)
    train(model, optimizer, 4)
    Checkpoints(tmp_path, RUN).save(model, optimizer, {})
    fresh = Checkpoints(tmp_path, Run("b", "model", (TrainerSession(2000, 0),)))
    model, optimizer = load(start)
    for step in (1, 2):
        train(model, optimizer, step)
        fresh.save(model, optimizer, {})
    kept = {step: (path / "trainer_state").is_dir() for step, path in steps_in(tmp_path).items()}
    assert kept == {1: False, 2: True, 4: True}


def test_a_run_that_went_back_prunes_what_it_left_behind_first(start: Path, tmp_path: Path) -> None:
    model, optimizer = load(start)
    train(model, optimizer, 4)
    Checkpoints(tmp_path, RUN, keep_states=None).save(model, optimizer, {})
    model, optimizer = load(start)
    train(model, optimizer, 3)
    Checkpoints(tmp_path, RUN.lived_on(2, 2000)).save(model, optimizer, {})
    assert [(path / "trainer_state").is_dir() for path in steps_in(tmp_path).values()] == [
        True,
        False,
    ]


def test_a_trainer_that_was_replaced_saves_nothing(start: Path, tmp_path: Path) -> None:
    """It was stopped with SIGSTOP, for example, and taken for dead; it would write other weights
    under the same numbers.
    """
    model, optimizer = load(start)
    train(model, optimizer, 1)
    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(model, optimizer, {})
    mark_run(RUN.lived_on(1, 2000), tmp_path)
    train(model, optimizer, 2)
    with pytest.raises(
        CheckpointError,
        match=r"step_2 is not written: a trainer that was started later goes on with run a",
    ):
        checkpoints.save(model, optimizer, {})
    assert list(steps_in(tmp_path)) == [1]


def test_a_damaged_state_is_named(start: Path, tmp_path: Path) -> None:
    model, optimizer = load(start)
    folder = Checkpoints(tmp_path / "out", RUN).save(model, optimizer, {})
    file = folder / "trainer_state" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(
        CheckpointError, match=r"cannot read the optimizer state in .*trainer_state"
    ):
        load_state(SavedStep.read(folder), optimizer)
