"""A trainer's starting point: `auto` never crosses runs or models, and logs its choice."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atroposlib.wire import TrainerSession
from example_trainer.errors import CheckpointError, ConfigError
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.runs import (
    Run,
    Start,
    agreed_start,
    choose_start,
    mark_run,
    marked_run,
    require_save_path,
    same_model,
    steps_in,
)
from tests.full_disks import FullDisk

MODEL = "someone/a-model"


def save(folder: Path, step: int, run: Run) -> Path:
    """A checkpoint's identity, without its weights."""
    path = folder / f"step_{step}"
    (path / "trainer_state").mkdir(parents=True, exist_ok=True)
    content = {
        "step": step,
        "updates": step,
        "run": run.record(),
        "batch": None,
        "unacknowledged": [],
    }
    (path / "trainer_state" / "trainer.json").write_text(json.dumps(content))
    return path


def begin(folder: Path, resume: str | None, now_ms: int, model: str = MODEL) -> Start:
    """Begin as a trainer does: choose, and name the run in the folder."""
    start = choose_start(resume, folder, model, now_ms)
    mark_run(start.run, folder)
    return start


def test_nothing_to_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start = choose_start(None, tmp_path, MODEL, 5000)
    assert start.checkpoint is None
    assert start.run.lives == (TrainerSession(5000, 0),)
    assert caplog.text == ""
    assert choose_start("auto", tmp_path / "none", MODEL, 5000).checkpoint is None
    assert "starting a run" in caplog.text
    with pytest.raises(CheckpointError, match="does not exist"):
        choose_start(str(tmp_path / "step_5"), tmp_path, MODEL, 5000)
    (tmp_path / "step_5").mkdir()
    with pytest.raises(CheckpointError, match=r"has no trainer_state/trainer\.json"):
        choose_start(str(tmp_path / "step_5"), tmp_path, MODEL, 5000)


def without_state(checkpoint: Path) -> Path:
    """Take a checkpoint's optimizer state away, as --keep-optimizer-states does."""
    state = checkpoint / "trainer_state"
    (state / "trainer.json").rename(checkpoint / "trainer.json")
    state.rmdir()
    return checkpoint


def test_a_state_is_preferred_to_later_weights_and_weights_to_nothing(tmp_path: Path) -> None:
    run = begin(tmp_path, None, 5000).run
    exact = save(tmp_path, 6, run)
    newest = without_state(save(tmp_path, 9, run))
    assert choose_start("auto", tmp_path, MODEL, 6000).checkpoint == exact
    assert choose_start(str(newest), tmp_path, MODEL, 6000).checkpoint == newest
    without_state(exact)
    start = choose_start("auto", tmp_path, MODEL, 6000)
    assert start.checkpoint == newest
    assert start.run.lives[-1] == TrainerSession(6000, 9)


def test_adapters_are_not_continued_without_their_state(tmp_path: Path) -> None:
    run = choose_start(None, tmp_path, MODEL, 5000, "adapter_step_").run
    mark_run(run, tmp_path, "adapter_step_")
    path = without_state(save(tmp_path, 3, run).rename(tmp_path / "adapter_step_3"))
    for resume in ("auto", str(path)):
        with pytest.raises(
            CheckpointError, match="keeps no optimizer state, from which adapters are continued"
        ):
            choose_start(resume, tmp_path, MODEL, 6000, "adapter_step_")


def test_auto_continues_the_run_and_its_epoch_grows_whatever_the_clock_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = begin(tmp_path, None, 5000).run
    save(tmp_path, 10, first)
    second = begin(tmp_path, "auto", 4000)
    assert second.checkpoint == tmp_path / "step_10"
    assert second.run.name == first.name
    assert second.run.lives == (TrainerSession(5000, 0), TrainerSession(5001, 10))
    assert f"run {first.name} goes on from step_10" in caplog.text
    # It served weights, and ended before it saved any; the next life's must not be taken for them.
    third = begin(tmp_path, "auto", 4000)
    assert third.run.lives == (TrainerSession(5000, 0), TrainerSession(5002, 10))


def test_a_fresh_run_beside_higher_steps_of_an_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = begin(tmp_path, None, 5000).run
    save(tmp_path, 40, old)
    fresh = begin(tmp_path, None, 4000).run
    assert fresh.epoch > old.epoch
    assert (
        f"holds checkpoints up to step 40 (step_40 of run {old.name}): run {fresh.name} starts "
        "afresh" in caplog.text
    )
    save(tmp_path, 3, fresh)
    caplog.clear()
    caplog.set_level(logging.INFO)
    resumed = begin(tmp_path, "auto", 9000)
    assert resumed.checkpoint == tmp_path / "step_3"
    assert (
        f"also holds step_40 of run {old.name}, which --resume PATH would continue" in caplog.text
    )
    # Without the folder's own word, the run that began last.
    (tmp_path / "run.json").unlink()
    assert choose_start("auto", tmp_path, MODEL, 9000).checkpoint == tmp_path / "step_3"


def test_a_run_without_a_checkpoint_is_started_anew_rather_than_another_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = begin(tmp_path, None, 5000).run
    save(tmp_path, 40, old)
    fresh = begin(tmp_path, None, 6000).run
    again = begin(tmp_path, "auto", 7000)
    assert again.checkpoint is None
    assert again.run.name == fresh.name
    assert again.run.epoch == 7000
    assert (
        f"run {fresh.name} began in {tmp_path} and has no checkpoint to go on from: starting it "
        "again" in caplog.text
    )


def test_what_was_asked_for_by_path_is_what_auto_continues_then(tmp_path: Path) -> None:
    old = begin(tmp_path, None, 5000).run
    first = save(tmp_path, 10, old)
    save(tmp_path, 20, old)
    begin(tmp_path, None, 6000)
    back = begin(tmp_path, str(first), 7000)
    assert (back.run.name, back.run.lives) == (
        old.name,
        (TrainerSession(5000, 0), TrainerSession(7000, 10)),
    )
    again = begin(tmp_path, "auto", 8000)
    assert again.checkpoint == first, "20 was left behind by going back to 10"
    save(tmp_path, 12, again.run)
    assert begin(tmp_path, "auto", 9000).checkpoint == tmp_path / "step_12"


def test_another_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save(tmp_path, 10, begin(tmp_path, None, 5000).run)
    for resume in ("auto", str(tmp_path / "step_10")):
        with pytest.raises(ConfigError) as caught:
            choose_start(resume, tmp_path, "someone/else", 6000)
        assert (
            f"trains {MODEL}, and --model-name is someone/else. Give --model-name {MODEL} to go on"
            in str(caught.value)
        )
        assert "or another --save-path" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_same_model_under_two_names(tmp_path: Path) -> None:
    for name in ("hub/model", "elsewhere/model"):
        (tmp_path / name).mkdir(parents=True)
    local, other = str(tmp_path / "hub/model"), str(tmp_path / "elsewhere/model")
    assert same_model(local, local)
    assert same_model("someone/model", local), "downloaded meanwhile"
    assert same_model(str(tmp_path / "gone/model"), local), "moved"
    assert same_model("", local), "not known"
    assert not same_model(other, local)
    assert not same_model("someone/model", "else/model")
    assert not same_model("someone/another", local)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    save(tmp_path, 10, begin(tmp_path, None, 5000).run)
    (tmp_path / "step_10" / "trainer_state" / "trainer.json").write_text("{")
    with pytest.raises(
        CheckpointError,
        match=r"step_10/trainer_state/trainer\.json .*move step_10 out of the folder",
    ):
        choose_start("auto", tmp_path, MODEL, 6000)
    assert begin(tmp_path, None, 6000).checkpoint is None, "a fresh run does not need it"
    (tmp_path / "run.json").write_text('{"name": 1}')
    (tmp_path / "step_10" / "trainer_state" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"run\.json .*remove it"):
        choose_start("auto", tmp_path, MODEL, 7000)


def test_a_run_is_marked_in_a_folder_that_is_made_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    mark_run(Run("a", MODEL, (TrainerSession(1, 0),)), folder)
    assert [file.suffix for file in folder.iterdir()] == [".json"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"cannot write .*run\.json: File exists; change --save-path"
    ):
        mark_run(Run("a", MODEL, (TrainerSession(1, 0),)), tmp_path / "file")


@pytest.mark.parametrize("place", ["file", "file/below", "link/below", "/proc/none/below"])
def test_a_folder_that_can_never_be_written_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"^--save-path: cannot write [^;]*; change --save-path$"):
        require_save_path(tmp_path / place)


def test_a_folder_is_tried_without_a_trace(full_disk: FullDisk) -> None:
    require_save_path(full_disk.path / "runs" / "first")
    assert not list(full_disk.path.iterdir())
    with full_disk.full(), pytest.raises(ConfigError, match=r"; make room there, or change"):
        require_save_path(full_disk.path / "runs")


def test_adapters_have_a_run_of_their_own(tmp_path: Path) -> None:
    whole = begin(tmp_path, None, 5000).run
    adapters = choose_start("auto", tmp_path, MODEL, 6000, "adapter_step_").run
    mark_run(adapters, tmp_path, "adapter_step_")
    assert adapters.name != whole.name
    assert marked_run(tmp_path) == whole
    assert marked_run(tmp_path, "adapter_step_") == adapters


def test_every_rank_is_told_the_same(tmp_path: Path) -> None:
    save(tmp_path, 10, begin(tmp_path, None, 5000).run)
    start = agreed_start(Ranks(), "auto", tmp_path, MODEL, 6000)
    assert start == choose_start("auto", tmp_path, MODEL, 6000)


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int]]:
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(["fresh", "auto", "back", "save", "save"]), st.integers(0, 9)
            ),
            max_size=25,
        )
    )


@settings(deadline=None, max_examples=60)
@given(stories())
@example(
    [("save", 0), ("auto", 0), ("save", 0), ("back", 0), ("auto", 0)]
)  # two lives from one step; the clock goes back
def test_auto_always_finds_the_end_of_the_line_that_was_worked_on_last(
    story: list[tuple[str, int]],
) -> None:
    """Fresh runs, resumes and returns to older steps, in any order, against a list of what each
    line has saved.

    A run that saves a step again replaces the folder, whichever run saved it first.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, now, owners = Path(name), 1000, {}
        start = begin(folder, None, now)
        step, line = 0, []  # the present step, and the steps of the present line that are saved
        for number, (what, choice) in enumerate(story):
            now += choice - 4  # the clock may go back
            if what == "save":
                step += 1 + choice % 3
                save(folder, step, start.run)
                owners[step] = number
                line = [kept for kept in line if kept[0] < step] + [(step, number)]
            elif what == "fresh":
                start, step, line = begin(folder, None, now), 0, []
            elif what == "back" and line:
                step = line[choice % len(line)][0]
                if owners[step] != dict(line)[step]:
                    continue
                start = begin(folder, str(folder / f"step_{step}"), now)
                assert start.saved is not None
                line = [kept for kept in line if kept[0] <= step]
            elif what == "auto":
                standing = [kept for kept, owner in line if owners[kept] == owner]
                epoch = start.run.epoch
                start = begin(folder, "auto", now)
                assert (start.saved.step if start.saved else None) == (
                    standing[-1] if standing else None
                )
                assert start.run.epoch > epoch
                step = standing[-1] if standing else 0
                line = [kept for kept in line if kept[0] <= step]
            assert set(steps_in(folder)) == set(owners)
