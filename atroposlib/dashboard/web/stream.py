"""Server-sent events for one open page, in the format of the HTML standard.

A page whose browser disconnects is forgotten. A page that does not read is closed in three cases:

* SEND_SECONDS have passed and the connection holds no more bytes,
* too many messages wait for it (live/hub.py),
* STREAM_SECONDS have passed. Every page then opens a new stream, because little data fits into the
  connection's buffers, so that a page which reads nothing is not noticed before.
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
"""An event, because scripts do not get comments, and a page must notice that its connection still
works."""


class EventStream(Response):
    """The answer of GET /ui/api/stream.

    Args:
        hub: source of the events.
        run: to show.
        hello: data of the first event.
        session_ends: returns the Unix time at which the page's sign-in ends, or None if it has
            ended. It is called again for each message, because a person may sign out on another
            page.
    """

    def __init__(
        self, hub: Hub, run: str, hello: dict[str, object], session_ends: Callable[[], float | None]
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._hub, self._run, self._hello, self._session_ends = hub, run, hello, session_ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the page goes away."""
        with self._hub.subscribed(self._run) as page:
            gone = asyncio.create_task(_gone(receive, page))
            try:
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                await self._send(send, RETRY + encode("hello", self._hello))
                await self._tell(page, send)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                logger.info("closed the stream of a page that read nothing for %g s", SEND_SECONDS)
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
                page.end(
                    "expired"
                    if began_until is not None and time.time() >= began_until
                    else "signed_out"
                )
            elif time.monotonic() >= renewed:
                page.end("renew")
            message = await page.next(
                min(HEARTBEAT_SECONDS, max(0.05, (ends or 0.0) - time.time()))
            )
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
