"""Timelines: what is read, summed up and handed to viewers is what was written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import timelines
from bench.timeline_spans import (
    Process,
    Span,
    check_trace,
    chrome_trace,
    extent,
    lanes,
    merged,
    read_folder,
    shares,
    within,
)
from vllm_patching.protocol.timeline import Timeline

START = 1_790_000_000_000_000_000

spans = st.lists(
    st.builds(
        lambda what, begin, length: Span(what, START + begin, START + begin + length),
        st.sampled_from(["train", "wait", "update"]),
        st.integers(0, 1000),
        st.integers(0, 200),
    ),
    max_size=20,
)


def moments(some: list[Span], what: str) -> set[int]:
    """The nanoseconds that spans of a kind cover."""
    return {moment for span in some if span.what == what for moment in range(span.begin, span.end)}


@given(spans)
def test_every_span_is_in_one_lane_and_none_overlaps(some: list[Span]) -> None:
    laid = lanes(some)
    assert sorted((s.what, s.begin, s.end) for lane in laid for s in lane) == sorted(
        (s.what, s.begin, s.end) for s in some
    )
    for lane in laid:
        assert all(before.end <= after.begin for before, after in pairwise(lane))
    assert all(len({span.what == "update" for span in lane}) == 1 for lane in laid)
    for aside in (False, True):
        mine = [span for span in some if (span.what == "update") is aside]
        at_once = max(
            (sum(s.begin <= span.begin < s.end for s in mine) for span in mine), default=0
        )
        assert sum((lane[0].what == "update") is aside for lane in laid) <= at_once + sum(
            s.begin == s.end for s in mine
        )


@given(spans, st.integers(0, 30))
def test_merging_keeps_what_is_covered(some: list[Span], gap: int) -> None:
    for what in ("train", "wait", "update"):
        exact, wide = moments(merged(some), what), moments(merged(some, gap), what)
        assert exact == moments(some, what)
        assert exact <= wide
        mine = [span for span in merged(some, gap) if span.what == what]
        assert all(after.begin - before.end > gap for before, after in pairwise(mine))


@given(spans, st.integers(0, 1000), st.integers(1, 500))
def test_shares_are_of_the_moments_between(some: list[Span], begin: int, length: int) -> None:
    first, last = START + begin, START + begin + length
    process = Process("trainer", "rank0", tuple(some))
    found = shares(process, first, last)
    for what in ("train", "wait", "update"):
        expected = len(moments(some, what) & set(range(first, last))) / length
        assert found.get(what, 0.0) == pytest.approx(expected)
    assert all(
        first <= span.begin <= span.end <= last for span in within(process, first, last).spans
    )


@given(st.lists(spans, min_size=1, max_size=3))
def test_a_trace_has_every_span_and_can_be_read(several: list[list[Span]]) -> None:
    processes = [
        Process("generator", str(number), tuple(some)) for number, some in enumerate(several)
    ]
    if not any(several):
        with pytest.raises(ValueError, match="no span"):
            chrome_trace(processes)
        return
    trace = chrome_trace(processes)
    check_trace(trace)
    start = extent(processes)[0]
    found = sorted(
        (event["pid"], event["name"], round(event["ts"] * 1e3), round(event["dur"] * 1e3))
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    )
    assert found == sorted(
        (pid, span.what, span.begin - start, span.end - span.begin)
        for pid, some in enumerate(several, 1)
        for span in some
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ph": "B"}, "phase 'B'"),
        ({"name": ""}, "no name"),
        ({"pid": "1"}, "no pid and tid"),
        ({"dur": -1.0}, "dur -1.0"),
        ({"ts": float("nan")}, "ts nan"),
        ({"ts": 0.001}, "begins before"),
    ],
)
def test_a_trace_that_no_viewer_could_read_is_refused(change: dict[str, Any], told: str) -> None:
    some = (Span("wait", START, START + 5000), Span("train", START + 5000, START + 9000))
    trace = chrome_trace([Process("trainer", "rank0", some)])
    trace["traceEvents"][-1] |= change
    with pytest.raises(ValueError, match=told):
        check_trace(trace)


def test_from_files_to_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for role, name in (("generator", "here-9001"), ("trainer", "rank0")):
        timeline = Timeline(folder / f"timeline-{role}-{name}.jsonl", role, name)
        timeline.write(
            "generating" if role == "generator" else "train", START, START + 10**9, version=3
        )
        timeline.write("update", START + 10**8, START + 2 * 10**8)
        timeline.close()
    with (folder / "timeline-trainer-rank0.jsonl").open("a") as file:
        file.write('{"what": "sync", "begin"')  # killed here
    processes, unreadable = read_folder(folder)
    assert [process.role for process in processes] == ["trainer", "generator"]
    assert unreadable == 1
    assert (
        timelines.main([str(folder), str(folder), "--output", str(tmp_path / "out"), "--to", "0.5"])
        == 0
    )
    assert "generating 100%, update 20%" in capsys.readouterr().out
    for name in ("run.trace.json", "run-2.trace.json"):
        trace = json.loads((tmp_path / "out" / name).read_text())
        assert trace["traceEvents"][3]["args"] == {"version": 3}
    picture = tmp_path / "out" / "timeline.svg"
    text = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "trainer rank0" in text
    drawn = picture.read_bytes()
    timelines.main([str(folder), str(folder), "--output", str(tmp_path / "out"), "--to", "0.5"])
    assert picture.read_bytes() == drawn, "the same spans are the same bytes"


def test_without_timelines_it_is_said_how_to_get_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timelines.main([str(tmp_path), "--output", str(tmp_path / "out")]) == 1
    assert f"LOCKSTEP_TIMELINE={tmp_path}" in capsys.readouterr().err
