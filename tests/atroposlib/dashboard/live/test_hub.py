"""Pages that are open: each gets the events that concern it, within bounds."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.dashboard.live import hub as hub_module
from atroposlib.dashboard.live.hub import Hub, encode


async def test_a_page_is_told_what_concerns_its_run() -> None:
    hub = Hub()
    hub.publish("a", "rows", {})
    with hub.subscribed("a") as first, hub.subscribed("b") as second:
        hub.publish("a", "rows", {"n": float("nan")})
        for run in ("a", "b"):
            hub.publish(run, "stack", {"text": "two\nlines"})
        assert (
            await first.next(60)
            == b'event: rows\ndata: {"n":null}\n\nevent: stack\ndata: {"text":"two\\nlines"}\n\n'
        )
        assert await second.next(60) == encode("stack", {"text": "two\nlines"})
        assert await second.next(0.01) is None
        hub.close()
        assert (await first.next(60), first.over) == (None, "stopping")
    assert len(hub) == 0


async def test_a_page_that_does_not_keep_up_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_WAITING", 3)
    monkeypatch.setattr(hub_module, "MAX_PAGES", 1)
    hub = Hub()
    with hub.subscribed("a") as slow:
        assert "close some" in hub.full
        for number in range(10):
            hub.publish("a", "rows", {"number": number})
        assert slow.over == "too_slow"
        assert await slow.next(1) is None, "what waited is gone with it"
    assert not hub.full


async def test_what_is_told_within_a_moment_is_sent_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "PACE_SECONDS", 1e6)
    hub = Hub()
    with hub.subscribed("a") as page:
        hub.publish("a", "rows", 1)
        assert await page.next(60) == encode("rows", 1), "the first goes out at once"
        waiting = asyncio.create_task(page.next(60))
        await asyncio.sleep(0.01)  # the first sending is over
        hub.publish("a", "rows", 2)
        hub.publish("a", "event", 3)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        hub.wake()
        assert await waiting == encode("rows", 2) + encode("event", 3)
