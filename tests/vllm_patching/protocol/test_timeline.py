"""Spans in a file: whole lines, a greatest length, and nothing that could end the process that
writes.
"""

from __future__ import annotations

import json
import threading
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.protocol import timeline as module
from vllm_patching.protocol.timeline import (
    LONGEST_SPAN_SECONDS,
    VARIABLE,
    Activity,
    Timeline,
    open_timeline,
    unix_ns,
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_names_its_process_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    for version in (1, 2):
        timeline = open_timeline("reference", "here:1/a b")
        with pytest.raises(KeyError), timeline.span("busy", version=version):
            raise KeyError
        timeline.close()
        timeline.close()
        timeline.write("busy", 0)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "timeline-reference-here_1_a_b.jsonl"
    head, first, again, second = lines(path)
    assert (
        (head["role"], head["name"])
        == (again["role"], again["name"])
        == ("reference", "here:1/a b")
    )
    assert [span["version"] for span in (first, second)] == [1, 2]
    assert head["began"] <= first["begin"] <= first["end"] <= second["begin"] <= unix_ns()


def test_without_the_variable_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    timeline = open_timeline("trainer", "rank0")
    timeline.write("train", 0, 1)
    assert not timeline.on
    assert not [*tmp_path.iterdir()]


def test_a_file_grows_no_further_than_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # also one that is continued
        timeline = Timeline(tmp_path / "t.jsonl", "trainer", "rank0", most_bytes=1000)
        for moment in range(100):
            timeline.write("train", moment, moment + 1)
        assert not timeline.on
    size = (tmp_path / "t.jsonl").stat().st_size
    assert 800 < size <= 1000
    assert lines(tmp_path / "t.jsonl")[-1]["what"] == "train"
    assert caplog.text.count("greatest length") == 2


def test_a_folder_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    timeline = Timeline(tmp_path / "file" / "t.jsonl", "trainer", "rank0")
    timeline.write("train", 0, 1)
    assert not timeline.on
    assert f"{VARIABLE}): " in caplog.text


def test_a_full_disk_ends_the_writing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline(tmp_path / "t.jsonl", "trainer", "rank0")

    def full(file: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    timeline.write("train", 0, 1)
    assert not timeline.on


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl", "trainer", "rank0")
    threads = [
        threading.Thread(
            target=lambda: [timeline.write("x" * 50, n, n) for n in range(50)], daemon=True
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(lines(tmp_path / "t.jsonl")) == 1 + 4 * 50


class Kept(Timeline):
    def __init__(self) -> None:
        super().__init__(None, "", "")
        self.spans: list[tuple[str, int, int]] = []

    def write(self, what: str, begin: int, end: int | None = None, **facts: Any) -> None:
        assert end is not None
        self.spans.append((what, begin, end))


@given(st.lists(st.tuples(st.sampled_from(["", "busy", "waits"]), st.integers(0, int(30e9)))))
def test_activities_follow_each_other(changes: list[tuple[str, int]]) -> None:
    """At every moment the spans show the last state, and a long one is written in pieces."""
    moments = list(accumulate(wait for _, wait in changes))
    told, kept = [what for what, _ in changes], Kept()
    clock = iter([*moments, 10**12])
    activity = Activity(kept, lambda: next(clock))
    for what in told:
        activity.be(what)
    activity.be("")
    for what, (begin, end) in zip(told, pairwise([*moments, 10**12]), strict=True):
        if begin < end:
            at = [span for span in kept.spans if span[1] < end and begin < span[2]]
            assert [span[0] for span in at] == [what] * bool(what)
    for (_, begin, end), (_, after, _) in pairwise(kept.spans):
        assert begin <= end <= after
    longest_wait = max((wait for _, wait in changes), default=0)
    inner = [end - begin for _, begin, end in kept.spans if end < 10**12]
    assert max(inner, default=0) <= LONGEST_SPAN_SECONDS * 1e9 + longest_wait
