"""When a server generated, stood still and took new weights, for the picture of a run (see
protocol/timeline.py).
"""

from __future__ import annotations

from typing import Any

from starlette.routing import get_route_path

from vllm_patching.protocol.timeline import Activity, Timeline, unix_ns
from vllm_patching.server.engine_calls import EngineState
from vllm_patching.server.guard import is_open


class ServerTimeline:
    """Spans of a server: `generating` while at least one request is under way, and `halted` while
    the engine stands still. It does so for an update or a trainer's turn. The span `update` goes
    from its begin to the answer that the new weights are served.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._activity = timeline, Activity(timeline)
        self._in_flight, self._halted = 0, False

    @property
    def on(self) -> bool:
        """Return whether spans are written."""
        return self._timeline.on

    def requests(self, change: int) -> None:
        """Add to the number of requests in flight."""
        self._in_flight += change
        self._tell()

    def engine(self, state: EngineState) -> None:
        """The engine was seen to run or to stand still; while it is not known, what was known last
        counts.
        """
        if state is not EngineState.UNKNOWN:
            self._halted = state is EngineState.PAUSED
            self._tell()

    def updated(self, began: float, version: int) -> None:
        """An update that began at a moment of time.monotonic() is over, and its version is served."""
        self._timeline.write("update", unix_ns(began), version=version)

    def close(self) -> None:
        """Write what is under way, and nothing more."""
        self._activity.be("")
        self._timeline.close()

    def _tell(self) -> None:
        activity = ""
        if self._halted:
            activity = "halted"
        elif self._in_flight:
            activity = "generating"
        self._activity.be(activity)


class PushTimeline(ServerTimeline):
    """Spans of a server that holds weights and samples nothing: each update is a `push`, and no
    engine halts.
    """

    def engine(self, state: EngineState) -> None:
        """Ignore the engine: this server has none."""

    def updated(self, began: float, version: int) -> None:
        """See ServerTimeline."""
        self._timeline.write("push", unix_ns(began), version=version)


class FollowRequests:
    """ASGI middleware behind the guard: counts the requests that may sample."""

    def __init__(self, app: Any, timeline: ServerTimeline) -> None:
        self._app, self._timeline = app, timeline

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or is_open("POST", get_route_path(scope))
        ):
            return await self._app(scope, receive, send)
        self._timeline.requests(1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._timeline.requests(-1)
