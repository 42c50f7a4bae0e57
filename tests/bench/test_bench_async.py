"""The benchmarks of asynchronous training: what they sum up, and roles that sleep against a real
service.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import async_modes, async_scaling
from bench.async_modes import found_in, work_of
from bench.figure_tables import NAMED
from bench.gpu.processes import BenchError
from bench.measured import COMMIT_VARIABLE, put_into
from bench.results_book import Book, FigureError
from bench.sleeping_roles import work_of as work_at
from bench.timeline_spans import Process, Span

pytestmark = pytest.mark.nightly


def row(step: int, age: int) -> dict[str, Any]:
    seconds = {"seconds_wait": 0.5, "seconds_train": 1.0, "seconds_sync": 0.5}
    return {
        "step": step,
        "tokens": 100,
        "sequences": 4,
        "reward_mean": step / 10,
        "age_mean": age,
        "age_max": age,
        **seconds,
    }


def test_a_regime_is_summed_up_without_its_first_steps() -> None:
    rows = [(2.0 * step, row(step, min(step, 2))) for step in range(1, 11)]
    found = found_in(rows, leave_out=4)
    assert (found["steps"], found["seconds"], found["seconds_a_step"]) == (6, 12.0, 2.0)
    assert (found["sampled_tokens_per_second"], found["age_mean"], found["age_max"]) == (
        50.0,
        2.0,
        2,
    )
    assert (found["reward_first"], found["reward_last"]) == (0.15, 0.95)
    with pytest.raises(BenchError):
        found_in(rows[:3], leave_out=4)
    shares = {"trainer": {"train": 0.5, "wait": 0.25}, "generator": {"generating": 0.9}}
    table = async_modes.report(
        {
            "regimes": {
                "turns": found | {"share_of_time": shares},
                "overlapped": {"failed": "a reason"},
            }
        }
    )
    assert re.search(r"turns +2.00 +50 +50% +25% +90% +2.00 +2 +0.15 to 0.95", table)
    assert "a reason" in table


def test_the_share_of_a_role_is_the_mean_over_its_processes() -> None:
    processes = [Process("generator", str(n), (Span("generating", 0, 50 * n),)) for n in (1, 2)]
    assert work_of(processes, 0, 100) == {"generator": {"generating": 0.75}}


@given(st.floats(100.0, 1e6), st.integers(1, 64), st.integers(1, 32), st.integers(1, 4096))
def test_a_generator_asleep_samples_as_fast_as_its_model(
    rate: float, groups: int, group: int, tokens: int
) -> None:
    work = work_at(rate, groups * group, group, tokens)
    assert work.in_flight == groups
    assert work.in_flight * work.group * work.tokens / work.seconds == pytest.approx(rate)


def test_a_shared_file_keeps_what_others_found(tmp_path: Path) -> None:
    put_into(tmp_path / "a.json", "modes", {"x": 1})
    put_into(tmp_path / "a.json", "scaling", {"y": 2})
    put_into(tmp_path / "a.json", "modes", {"x": 3})
    assert json.loads((tmp_path / "a.json").read_text()) == {"modes": {"x": 3}, "scaling": {"y": 2}}


@pytest.mark.usefixtures("forked_children")
def test_sleeping_generators_against_a_real_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One generator for a moment, then as fast as one can, then a queue that is emptied: every
    figure is there.
    """
    monkeypatch.setattr(async_scaling, "RAMP_SECONDS", 0.1)
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    into = tmp_path / "async.json"
    words = [
        "--output",
        str(tmp_path),
        "--generators",
        "1",
        "--seconds",
        "2",
        "--clients",
        "1",
        "--into",
        str(into),
    ]
    assert async_scaling.main([*words, "--batch", "16"]) == 0
    data = json.loads(into.read_text())["scaling"]
    one, rushed, drain = (
        data["generators"]["1"],
        data["saturation"]["service"],
        data["saturation"]["drain"],
    )
    assert one["offered_tokens_per_second"] > 0 < one["service_core_share"]
    assert rushed["trained_groups_per_second"] > 0 < drain["groups"]
    assert rushed["post_ms"]["p50"] <= rushed["post_ms"]["p99"]
    book = Book(tmp_path)
    assert NAMED["async_full_at"](book).endswith(" of 32B")


def test_no_document_calls_another_run_the_same(tmp_path: Path) -> None:
    def told(*killed: list[object]) -> str:
        whole = {"steps": [["a", 0.0, 5, 5, 0], ["b", 0.5, 6, 6, 0]], "weights": "w"}
        runs = {
            "whole": whole,
            "killed": {
                "steps": list(killed) or whole["steps"],
                "weights": "w",
                "killed_after_step": 1,
            },
        }
        put_into(tmp_path / "async.json", "exact", {"one copy": {"runs": runs}})
        return NAMED["async_exact"](Book(tmp_path))

    assert (
        told()
        == "with one copy and with a broadcast, killed after step 1 of 2. None of 11 tokens differs"
    )
    with pytest.raises(FigureError, match="one copy: the killed run differs"):
        told(["a", 0.0, 5, 5, 0], ["c", 0.5, 6, 6, 0])
