"""A server's spans: requests that may sample, and an engine that stands still."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from vllm_patching.protocol.timeline import Timeline
from vllm_patching.server.engine_calls import EngineState
from vllm_patching.server.timeline import FollowRequests, ServerTimeline


def test_generating_is_interrupted_while_the_engine_stands_still(tmp_path: Path) -> None:
    timeline = ServerTimeline(Timeline(tmp_path / "t.jsonl", "generator", "here"))
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        arrived.set()
        await go_on.wait()
        if scope["path"] == "/broken":
            raise ConnectionError("the client has gone")

    follow = FollowRequests(app, timeline)

    def ask(method: str, path: str) -> asyncio.Task[None]:
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        return asyncio.create_task(follow(scope, None, None))

    async def serve() -> None:
        ignored = [ask("GET", "/health"), ask("POST", "/bridge/begin")]
        await asyncio.wait_for(arrived.wait(), 60)
        arrived.clear()
        requests = [ask("POST", "/generate"), ask("POST", "/broken")]
        await asyncio.wait_for(arrived.wait(), 60)
        begun = time.monotonic()
        for state in (
            EngineState.UNKNOWN,
            EngineState.PAUSED,
            EngineState.UNKNOWN,
            EngineState.RUNNING,
        ):
            timeline.engine(state)
        timeline.updated(begun, 7)
        go_on.set()
        await asyncio.gather(*ignored, *requests, return_exceptions=True)

    asyncio.run(serve())
    timeline.engine(
        EngineState.PAUSED
    )  # as for a turn of the trainer's, which a stop of the server ends
    timeline.close()
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert rows[0]["role"] == "generator"
    assert [row["what"] for row in rows[1:]] == [
        "generating",
        "halted",
        "update",
        "generating",
        "halted",
    ]
    generating, halted, update, again, _ = rows[1:]
    assert (generating["end"], halted["end"]) == (halted["begin"], again["begin"])
    assert update["version"] == 7
    assert (
        generating["begin"] <= update["begin"] <= halted["begin"] <= update["end"] <= again["end"]
    )
