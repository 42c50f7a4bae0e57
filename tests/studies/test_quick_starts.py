"""The runs of studies/quick_starts.py: their commands, the figures of a row, and a command that fails
or takes too long.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from bench.figure_tables import NAMED
from bench.results_book import Book, FigureError
from example_trainer.launcher.quickstart.options import parse
from example_trainer.launcher.starter_models import LEARNING_RATES
from studies import quick_starts


@pytest.mark.parametrize(
    ("run", "seed", "lr"),
    [("3", 3, None), ("0 flat", 0, 0.0), ("12 #2", 12, None), ("1 flat #3", 1, 0.0)],
)
def test_a_run_is_named_by_its_seed(run: str, seed: int, lr: float | None, tmp_path: Path) -> None:
    model = quick_starts.MODELS["arithmetic"]
    words = quick_starts.command(quick_starts.run_name(run), "arithmetic", 7, tmp_path, model)
    assert words[1:3] == ["-m", "example_trainer.launcher.quickstart"]
    options = parse(words[3:])
    assert (options.seed, options.steps, options.output, options.model) == (
        seed,
        7,
        tmp_path,
        str(model),
    )
    assert options.lr == (LEARNING_RATES["arithmetic"] if lr is None else lr)


@pytest.mark.parametrize("text", ["", "flat", "-1", "1 steep", "1 #"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="names no run"):
        quick_starts.run_name(text)


def test_the_last_batches_are_summarised_as_shares_of_right_answers() -> None:
    lines = (
        [{"reward_mean": -1.0}] * 30
        + [{"reward_mean": 1.0}] * (quick_starts.LATE - 1)
        + [{"reward_mean": 0.5}]
    )
    late = quick_starts.late_batches(lines)
    assert late["lowest"] == 0.75
    assert late["mean"] == pytest.approx(1 - 0.25 / quick_starts.LATE)


def test_the_load_is_read_until_the_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_starts, "LOAD_INTERVAL", 0.01)
    loads = quick_starts.run_and_read_load(
        [sys.executable, "-c", "print('well')"], tmp_path / "log", 60
    )
    assert loads
    assert all(load >= 0 for load in loads)
    assert (tmp_path / "log").read_text() == "well\n"


@pytest.mark.parametrize(
    ("program", "seconds", "problem"),
    [
        ("print('no room'); raise SystemExit(3)", 60.0, "status 3: no room"),
        ("import time; time.sleep(600)", 0.0, "stopped after 0 seconds"),
    ],
)
def test_a_failure_is_reported_with_the_output(
    program: str, seconds: float, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_starts, "LOAD_INTERVAL", 0.01)
    with pytest.raises(RuntimeError, match=problem):
        quick_starts.run_and_read_load([sys.executable, "-c", program], tmp_path / "log", seconds)


def written_rows(folder: Path, *, dated: bool) -> Book:
    """Write two rows of quick_starts.json that have what the range needs."""
    measured = (
        {"measured": {"commit": "abc", "date": "2026-01-02 03:04", "run": "2026-01-02 03:00"}}
        if dated
        else {}
    )
    rows = {
        f"seed {seed}": {
            "seed": seed,
            "eval_after": end,
            "load": {"mean": load},
            "machine": {"cpus": 2},
        }
        | measured
        for seed, end, load in ((1, 0.9921875, 1.2), (0, 0.98046875, 7.7))
    }
    (folder / "quick_starts.json").write_text(json.dumps(rows))
    return Book(folder)


def test_the_range_is_that_of_all_rows(tmp_path: Path) -> None:
    book = written_rows(tmp_path, dated=True)
    text = NAMED["quick_start_range"](book)
    assert text == "All 2 runs on 2 cores, at a load of 1 to 8, ended between 98.0% and 99.2%"


def test_a_row_without_a_date_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FigureError, match="no commit and date"):
        NAMED["quick_start_range"](written_rows(tmp_path, dated=False))
