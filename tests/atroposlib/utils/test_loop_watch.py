"""The watch over an event loop, with code that blocks it until the log has the line about it."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from atroposlib.utils.loop_watch import LoopWatch

LIMIT = 0.2


def block_until_logged(caplog: pytest.LogCaptureFixture, count: int) -> float:
    """Block until the log has so many lines; return the seconds."""
    began = time.monotonic()
    while len(caplog.records) < count:
        assert time.monotonic() < began + 60
        time.sleep(0.01)
    return time.monotonic() - began


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


async def test_the_line_names_the_code_that_blocks_while_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def grade() -> None:
        block_until_logged(caplog, 1)

    with LoopWatch(LIMIT):
        await asyncio.gather(grade(), asyncio.sleep(0))
    (line,) = lines(caplog)
    assert re.match(
        r"the event loop has stood still for \d+ s in block_until_logged \(test_loop_watch\.py, line \d+\), and",
        line,
    )
    assert "asyncio.to_thread" in line


async def test_further_lines_come_when_the_sum_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocked = 0.0
    with LoopWatch(LIMIT) as watch:
        for count in (1, 2, 3):
            blocked += block_until_logged(caplog, count)
            while watch._still:
                await asyncio.sleep(0.01)
    assert blocked > 3 * LIMIT, "the third line is due at four times the limit, not at three"
    assert len(lines(caplog)) == 3


async def test_a_loop_that_runs_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with LoopWatch(LIMIT):
        end = time.monotonic() + 5 * LIMIT
        while time.monotonic() < end:
            await asyncio.sleep(LIMIT / 20)
    assert lines(caplog) == []
