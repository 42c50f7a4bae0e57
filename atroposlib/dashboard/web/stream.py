"""Server-sent events: what is new, to one page that is open.

The format is the one of the HTML standard. A page that goes away is forgotten. One that takes nothing is let go of: after
SEND_SECONDS if there is more to send than the connection holds, when too much waits for it (live/hub.py), and in any case after
STREAM_SECONDS, when every page asks anew, because of one that has read nothing nobody knows as long as there is little to send.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.dashboard.live.hub import Hub, Subscription, encode
from atroposlib.web.bounded_protocol import abort_connection

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
SEND_SECONDS = 20.0
STREAM_SECONDS = 600.0
RETRY = b"retry: 2000\n\n"
HEARTBEAT = b"event: heartbeat\ndata: {}\n\n"
"""An event and no comment: a page must hear that its connection is there, which no script is told of a comment."""


class EventStream(Response):
    """The answer of GET /ui/api/stream.

    Args:
        hub: that tells what is new.
        run: that is shown.
        hello: data of the first event.
        session_ends: Unix time at which the page's sign-in ends, asked again and again, because a person may sign out on
            another page; None if it has ended.
    """

    def __init__(self, hub: Hub, run: str, hello: dict[str, object], session_ends: Callable[[], float | None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._hub, self._run, self._hello, self._session_ends = hub, run, hello, session_ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the page goes away."""
        with self._hub.subscribed(self._run) as page:
            gone = asyncio.create_task(_gone(receive, page))
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send(send, RETRY + encode("hello", self._hello))
                await self._tell(page, send)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                logger.info("a page took nothing for %g s and is let go of", SEND_SECONDS)
                abort_connection(scope)
            finally:
                gone.cancel()
                await asyncio.wait([gone])

    async def _tell(self, page: Subscription, send: Send) -> None:
        began_until = self._session_ends()
        renewed = time.monotonic() + STREAM_SECONDS
        while True:
            ends = self._session_ends()
            if ends is None:
                page.end("expired" if began_until is not None and time.time() >= began_until else "signed_out")
            elif time.monotonic() >= renewed:
                page.end("renew")
            message = await page.next(min(HEARTBEAT_SECONDS, max(0.05, (ends or 0.0) - time.time())))
            if page.over == "gone":
                return
            if message is not None:
                await self._send(send, message)
            elif page.over:
                await self._send(send, encode("bye", {"reason": page.over}))
                return
            else:
                await self._send(send, HEARTBEAT)

    @staticmethod
    async def _send(send: Send, body: bytes) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive, page: Subscription) -> None:
    """Wait until the browser has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    page.end("gone")
