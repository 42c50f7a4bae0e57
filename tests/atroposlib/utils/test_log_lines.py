"""The log of a server stays bounded whatever its clients send, and counts the lines left out."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.utils.log_lines import LINES_SECONDS, MAX_LINE, MAX_LINES, BoundedLines, one_line


def record(message: str, *arguments: object, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, "file", line, message, arguments, None)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 2.0**-7, 1.0, LINES_SECONDS]), st.integers(1, 80)),
        max_size=20,
    )
)
def test_no_line_is_lost_without_being_counted(bursts: list[tuple[float, int]]) -> None:
    now = 0.0
    bounded = BoundedLines(lambda: now)
    written: list[tuple[float, int]] = []
    sent = 0
    for pause, lines in bursts:
        now += pause
        for _ in range(lines):
            line = record("refused %s", "x")
            sent += 1
            if bounded.filter(line):
                left_out = line.getMessage().partition("(")[2].partition(" ")[0]
                written.append((now, int(left_out or 0)))
    now += LINES_SECONDS
    last = record("refused %s", "x")
    assert bounded.filter(last)
    left_out = last.getMessage().partition("(")[2].partition(" ")[0]
    assert len(written) + sum(count for _, count in written) + int(left_out or 0) == sent
    for at, _ in written:
        assert sum(at <= other < at + LINES_SECONDS for other, _ in written) <= 2 * MAX_LINES


def test_other_statements_are_not_affected_and_long_lines_are_cut() -> None:
    bounded = BoundedLines(lambda: 0.0)
    assert sum(bounded.filter(record("one")) for _ in range(1000)) == MAX_LINES
    long = record("%s", "x" * 100_000, line=2)
    assert bounded.filter(long)
    assert len(long.getMessage()) == MAX_LINE


@given(st.text(max_size=20))
def test_no_client_writes_a_line_of_its_own(name: str) -> None:
    line = record("environment %d registered: %s", 3, name)
    assert one_line(line)
    assert line.getMessage().isprintable()
    if name.isprintable():
        assert line.getMessage() == f"environment 3 registered: {name}"


def test_a_forged_line_stays_within_its_own() -> None:
    line = record("environment registered: %s", "a\n2026-01-01 INFO api: reset\x1b[2J")
    assert one_line(line)
    assert line.getMessage() == "environment registered: a\\n2026-01-01 INFO api: reset\\x1b[2J"
