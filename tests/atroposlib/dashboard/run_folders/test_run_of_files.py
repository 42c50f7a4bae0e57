"""Runs as they lie in folders: found, read while they grow, and read again when they are over."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.dashboard.app import weights_json
from atroposlib.dashboard.run_folders import runs as catalogue_module
from atroposlib.dashboard.run_folders import runs as run_module
from atroposlib.dashboard.run_folders.columns import MAX_POINTS
from atroposlib.dashboard.run_folders.runs import (
    Change,
    Run,
    RunCatalogue,
    RunFiles,
    UnknownRunError,
    find_runs,
    glance,
)


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "reward_mean": step / 10, "checksum": "c"} | more


def append(path: Path, *rows: Any) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in rows))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs as quick start, start.sh and a trainer alone leave them."""
    quick = tmp_path / "quickstart"
    write(quick / "trainer" / "metrics.jsonl", row(1), row(2))
    write(
        quick / "environment" / "metrics.jsonl",
        {"step": 1, "train/percent_correct": 0.5},
        {"step": 1, "train/turns": 2.0},
    )
    write(
        quick / "observed" / "run.json", {"model": "m", "num_steps": 5, "began": 1.0, "ended": 2.0}
    )
    write(
        quick / "observed" / "events.jsonl",
        {"kind": "server_lost", "text": "gone", "time": 3.0, "severity": "error"},
        {"kind": 1},
    )
    write(tmp_path / "alone" / "metrics.jsonl", row(1))
    write(tmp_path / "alone" / "metrics.1.jsonl", row(1), row(7))
    write(tmp_path / "alone" / "checkpoints" / "deep" / "metrics.jsonl", row(1))
    write(
        tmp_path / "rollouts-8000.observed" / "run.json",
        {"model": "n", "log_dir": str(tmp_path / "elsewhere")},
    )
    return tmp_path


def test_runs_are_found_wherever_they_lie(runs: Path) -> None:
    found = {files.name: files for files in find_runs(runs)}
    assert set(found) == {"quickstart", "alone", "alone (earlier run 1)", "rollouts-8000"}
    assert len({files.id for files in found.values()}) == 4
    assert found["quickstart"].observed == runs / "quickstart" / "observed"
    assert found["alone (earlier run 1)"].evaluations.name == "evaluations.1.jsonl"
    (single,) = find_runs(runs / "quickstart")
    assert single.name == "quickstart"
    assert single.id == found["quickstart"].id, "its address is the same from wherever it is opened"
    write(runs / "elsewhere" / "metrics.jsonl", row(1))
    told = {files.name: files for files in find_runs(runs)}
    assert told["elsewhere"].observed == runs / "rollouts-8000.observed", (
        "where the trainer said that it writes"
    )
    assert find_runs(runs / "nothing") == []


def test_a_line_for_each_run(runs: Path) -> None:
    catalogue = RunCatalogue([runs])
    listed = {one["name"]: one for one in catalogue.summaries()}
    assert listed["quickstart"]["state"] == "ended"
    assert (
        listed["quickstart"]["steps"],
        listed["quickstart"]["of_steps"],
        listed["quickstart"]["reward_last"],
    ) == (2, 5, 0.2)
    assert listed["alone"]["state"] == "running", "it was written a moment ago"
    earlier = catalogue.get(listed["alone (earlier run 1)"]["id"]).extent()
    assert (earlier["rows"], earlier["last_step"]) == (2, 7)
    assert catalogue.default() in {one["id"] for one in listed.values()}
    with pytest.raises(UnknownRunError, match="'gone'"):
        catalogue.get("gone")
    with pytest.raises(UnknownRunError, match="no folder"):
        RunCatalogue([]).get("")


def test_a_run_whose_files_change_is_running_whatever_the_writers_clock_shows(runs: Path) -> None:
    metrics = runs / "alone" / "metrics.jsonl"
    catalogue = RunCatalogue([runs])

    def state_after(stamp: float) -> str:
        os.utime(metrics, (stamp, stamp))
        return str({one["name"]: one for one in catalogue.summaries()}["alone"]["state"])

    day = 86_400.0
    assert state_after(time.time() + day) == "unknown", (
        "the clock went back, or the writer's is a day ahead"
    )
    append(metrics, row(3))
    assert state_after(time.time() + day + 1) == "running", "it grew between two looks"
    append(metrics, row(4))
    assert state_after(time.time() - day) == "running", "the writer's clock went back"


def test_the_best_reward_of_each_run_wherever_in_it_it_was(runs: Path) -> None:
    metrics = runs / "alone" / "metrics.jsonl"
    write(
        metrics,
        row(1),
        row(2, reward_mean=0.9),
        row(3, reward_mean=None),
        row(4, reward_mean=0.7),
        row(5, reward_mean=0.8),
    )
    catalogue = RunCatalogue([runs])
    ids = {files.name: files.id for files in catalogue.list_runs()}
    unread = catalogue.best_rewards(0.0)
    assert unread[ids["alone"]] == {"reward_best": None, "best_step": None, "is_read": False}
    found = catalogue.best_rewards(60.0)
    assert found[ids["alone"]] == {"reward_best": 0.9, "best_step": 2, "is_read": True}
    assert found[ids["rollouts-8000"]] == {
        "reward_best": None,
        "best_step": None,
        "is_read": True,
    }, "it has no rows"
    append(
        metrics, row(2, reward_mean=0.1)
    )  # the run was resumed: what follows takes the place of what was
    assert catalogue.best_rewards(60.0)[ids["alone"]]["reward_best"] == 0.1
    write(metrics, row(1))
    assert catalogue.best_rewards(60.0)[ids["alone"]]["reward_best"] == 0.1
    append(metrics, row(2, reward_mean=0.5))
    assert catalogue.best_rewards(60.0)[ids["alone"]]["best_step"] == 2


def test_long_runs_are_let_go_of_when_they_are_many(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = RunCatalogue([runs])
    first, second = [files.id for files in catalogue.list_runs() if files.metrics.is_file()][:2]
    kept = catalogue.get(first)
    catalogue.get(second)
    assert catalogue.get(first) is kept
    monkeypatch.setattr(catalogue_module, "MAX_CELLS", 1)
    catalogue.get(second)
    assert catalogue.get(second).extent()["rows"] > 0, (
        "the one that is asked for stays, whatever its length"
    )
    assert catalogue.get(first) is not kept


def test_what_is_new_is_told_once_whoever_reads_it(runs: Path) -> None:
    told: list[tuple[str, Any]] = []

    def tell(run: Run, change: Change) -> None:
        told.extend(change.to_json(run))

    catalogue = RunCatalogue([runs / "quickstart"], on_change=tell)
    run = catalogue.get("")
    assert [name for name, _ in told] == ["rows"], "a page that was open knows other rows"
    told.clear()
    append(run.files.metrics, row(3, mismatched_tokens=2, compared_tokens=10))
    append(
        run.files.evaluations,
        {"id": 1, "time": 9.0, "name": "sums", "metrics": {"eval/a": 0.5, "b": None}, "step": 3},
    )
    for _ in range(2):
        catalogue.get("")
    assert [name for name, _ in told] == ["rows", "evaluation", "event", "event"]
    assert told[0][1]["new"] == [row(3, mismatched_tokens=2, compared_tokens=10)]
    assert told[1][1]["metrics"] == {"eval/a": 0.5}
    assert {data["kind"] for name, data in told if name == "event"} == {"mismatch", "evaluation"}
    assert [event.kind for event in run.events()[0]][:1] == ["server_lost"]
    told.clear()
    append(run.files.metrics, *(row(step) for step in range(4, 100)))
    catalogue.get("")
    assert told[0][1]["new"] is None, "they are too many to be told"
    assert told[0][1]["rows"] == 99


def test_a_resumed_run_takes_back_what_it_does_again(runs: Path) -> None:
    run = Run(find_runs(runs / "quickstart")[0])
    run.refresh()
    append(run.files.metrics, row(3, batches_skipped=2), row(4))
    run.refresh()
    assert {event.kind for event in run.events()[0]} == {"server_lost", "skipped_batch"}
    before = run.generation
    draft = write(run.files.metrics.with_suffix(".draft"), row(1), row(2, reward_mean=5.0))
    draft.replace(run.files.metrics)
    change = run.refresh()
    assert change.rewritten
    assert run.generation != before
    assert run.series(["reward_mean"], 10).mean["reward_mean"].tolist() == [0.1, 5.0]
    assert [one["step"] for one in run.updates()] == [1, 2]
    assert {event.kind for event in run.events()[0]} == {"server_lost"}
    append(run.files.metrics, row(2, reward_mean=6.0))
    assert run.refresh().rewritten
    assert run.series(["reward_mean"], 10).mean["reward_mean"].tolist() == [0.1, 6.0]


def test_the_environments_figures_stand_at_the_trainers_steps(runs: Path) -> None:
    run = Run(find_runs(runs / "quickstart")[0])
    run.refresh()
    assert run.names() == ["reward_mean", "environment/percent_correct", "environment/turns"]
    series = run.series(["environment/percent_correct", "environment/turns"], 10)
    assert series.mean["environment/percent_correct"].tolist()[0] == 0.5
    assert series.mean["environment/turns"].tolist()[0] == 2.0
    assert (
        series.mean["environment/turns"].tolist()[1] != series.mean["environment/turns"].tolist()[1]
    ), "none of step 2"


def test_what_the_environment_says_of_a_step_is_told_whichever_file_is_ahead(runs: Path) -> None:
    told: list[Any] = []

    def tell(run: Run, change: Change) -> None:
        told.extend(data["new"] for name, data in change.to_json(run) if name == "rows")

    catalogue = RunCatalogue([runs / "quickstart"], on_change=tell)
    files = catalogue.get("").files
    assert files.environment is not None
    told.clear()
    for path, more in (
        (files.metrics, row(3)),
        (files.environment, {"step": 3, "train/percent_correct": 0.75}),
        (files.environment, {"step": 4, "train/percent_correct": 0.8}),
        (files.environment, {"step": 4, "train/turns": 3.0, "env/other": 1.0}),
        (files.metrics, row(4)),
    ):
        append(path, more)
        catalogue.get("")
    four = row(4) | {"environment/percent_correct": 0.8, "environment/turns": 3.0}
    assert told == [[row(3)], [{"step": 3, "environment/percent_correct": 0.75}], [four]]


def test_counts_are_added_up_over_every_row_of_a_long_run(tmp_path: Path) -> None:
    steps = MAX_POINTS + 1
    lines = (
        f'{{"step":{step},"compared_tokens":{step},"mismatched_tokens":{step % 2}}}\n'
        for step in range(1, steps + 1)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run = Run(find_runs(tmp_path)[0])
    run.refresh()
    assert len(run.series(["compared_tokens"], MAX_POINTS).step) == MAX_POINTS, (
        "fewer than it has rows"
    )
    whole = {
        "on": True,
        "compared": steps * (steps + 1) / 2,
        "mismatched": (steps + 1) // 2,
        "older": 0,
        "first": None,
        "kernels": None,
    }
    assert weights_json(run, [], None)["deterministic"] == whole
    append(
        tmp_path / "metrics.jsonl",
        {"step": steps, "compared_tokens": 1, "mismatched_tokens": 1, "older_tokens": 8},
        {"step": steps + 1},
    )
    run.refresh()  # the last step was done again, and one that compared nothing has come
    whole |= {"compared": steps * (steps - 1) / 2 + 1, "older": 8}
    assert weights_json(run, [], {"compared": 7, "mismatched": 7, "first": {"token": 5}})[
        "deterministic"
    ] == whole | {"first": {"token": 5}}
    assert run.newest(["compared_tokens", "step", "gone"]) == {
        "compared_tokens": 1.0,
        "step": None,
        "gone": None,
    }


def test_files_that_cannot_be_read_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    run = Run(
        RunFiles("a", "a", tmp_path, tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl")
    )
    for _ in range(3):
        assert not run.refresh()
    assert caplog.text.count("cannot read") == 1
    assert glance(run.files)["steps"] == 0
    monkeypatch.setattr(run_module, "MAX_EVENTS", 2)
    run = Run(
        RunFiles(
            "b",
            "b",
            tmp_path,
            write(tmp_path / "m", *(row(step, batches_skipped=1) for step in range(5))),
            tmp_path / "e",
        )
    )
    run.refresh()
    events, left_out = run.events()
    assert ([event.step for event in events], left_out) == ([3, 4], 3)


def test_damaged_lines_are_skipped_and_named_and_the_rest_of_the_run_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = write(tmp_path / "metrics.jsonl", row(1))
    with metrics.open("ab") as file:
        file.write(b'\x00\xff{"step\n[1]\n' + json.dumps(row(2)).encode() + b'\n{"step": 3, "rew')
    run = Run(find_runs(tmp_path)[0])
    for _ in range(2):
        run.refresh()
    assert run.extent()["last_step"] == 2
    (line,) = caplog.messages
    assert line.startswith(f"2 lines of {metrics} are damaged and skipped")
    with metrics.open("ab") as file:
        file.write(b'ard_mean": 0.5}\nnonsense\n')
    run.refresh()
    assert run.extent()["last_step"] == 3, "its end has been written"
    assert caplog.messages[1].startswith(f"3 lines of {metrics} are damaged")
