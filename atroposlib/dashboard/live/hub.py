"""The streams of server-sent events to the pages that are open.

The hub puts each message into a bounded queue of every page that shows the run. A page whose browser
disconnects is forgotten. A page that does not read is closed in three cases:

* SEND_SECONDS have passed and the connection holds no more bytes,
* too many messages wait for it,
* STREAM_SECONDS have passed. Every page then opens a new stream. Little data fits into the
  connection's buffers, so a page that reads nothing is noticed only then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.web.middleware import abort_connection

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Messages that may wait for one page."""
MAX_BYTES_WAITING = 8 << 20
"""And so many bytes of them, if there are several."""
MAX_PAGES = 100
"""Pages with an open connection for events."""
PACE_SECONDS = 0.5
"""Between two sendings to a page: events within it go out together, as each sending costs more than
its content."""

HEARTBEAT_SECONDS = 10.0
SEND_SECONDS = 20.0
STREAM_SECONDS = 600.0
RETRY = b"retry: 2000\n\n"
HEARTBEAT = b"event: heartbeat\ndata: {}\n\n"
"""An event, because scripts do not get comments, and a page must notice that its connection still
works."""


class Subscription:
    """Messages that wait for one page."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.over = ""
        """The reason why the stream ends; empty while it goes on."""
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def put(self, message: bytes) -> None:
        """Queue a message for the page. `wake` sends it."""
        if self.over:
            return
        if len(self._waiting) >= MAX_WAITING or (
            self._waiting and self._bytes + len(message) > MAX_BYTES_WAITING
        ):
            self.end("too_slow")
            return
        self._waiting.append(message)
        self._bytes += len(message)

    @property
    def waits(self) -> bool:
        """True if a message waits."""
        return bool(self._waiting)

    def end(self, reason: str) -> None:
        """End the stream after the waiting messages, which a page that is too slow does not get."""
        if not self.over:
            self.over = reason
            if reason == "too_slow":
                self._waiting.clear()
            self._news.set()

    def wake(self) -> None:
        """End a wait in `next`."""
        self._news.set()

    async def next(self, seconds: float) -> bytes | None:
        """Return all waiting messages together; None if none came within so many seconds, or after
        the end.
        """
        if not self._waiting and not self.over:
            self._news.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return None
        messages = b"".join(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        return messages or None


class Hub:
    """Every page that is open. All of it runs on one event loop, but for `publish_from_thread`."""

    def __init__(self) -> None:
        self._pages: set[Subscription] = set()
        self._waking: asyncio.TimerHandle | None = None
        self._woken = float("-inf")
        """When the pages were, by the loop's clock."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._pages)

    def runs(self) -> set[str]:
        """Return the runs that pages show."""
        return {page.run for page in self._pages}

    @property
    def full(self) -> str:
        """The reason why no page more may subscribe; empty if one may."""
        if len(self._pages) < MAX_PAGES:
            return ""
        return f"{MAX_PAGES} pages are open, and no more get events: close some of them"

    @contextmanager
    def subscribed(self, run: str) -> Iterator[Subscription]:
        """Queue the news of a run for one page while the block runs."""
        self._loop = asyncio.get_running_loop()
        page = Subscription(run)
        self._pages.add(page)
        try:
            yield page
        finally:
            self._pages.discard(page)

    def publish(self, run: str, event: str, data: Any) -> None:
        """Queue an event for the pages that show a run. It is encoded once, however many there are."""
        pages = [page for page in self._pages if page.run == run]
        if pages:
            message = encode(event, data)
            for page in pages:
                page.put(message)
            if self._waking is None:
                loop = asyncio.get_running_loop()
                self._waking = loop.call_at(
                    max(loop.time(), self._woken + PACE_SECONDS), self._send
                )

    def publish_from_thread(self, run: str, event: str, data: Any) -> None:
        """Call `publish` from any thread."""
        loop = self._loop
        if loop is not None and self._pages and not loop.is_closed():
            loop.call_soon_threadsafe(self.publish, run, event, data)

    def _send(self) -> None:
        self._waking, self._woken = None, asyncio.get_running_loop().time()
        for page in self._pages:
            if page.waits:
                page.wake()

    def wake(self) -> None:
        """Let each page check its sign-in, because a person has signed out."""
        for page in self._pages:
            page.wake()

    def close(self) -> None:
        """End every stream, because the service stops."""
        for page in list(self._pages):
            page.end("stopping")


def encode(event: str, data: Any) -> bytes:
    """Return a server-sent event. JSON has no line ends, so it is one line."""
    body = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return b"event: %s\ndata: %s\n\n" % (event.encode(), body)


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
                expired = began_until is not None and time.time() >= began_until
                page.end("expired" if expired else "signed_out")
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
