"""An event loop that sees its connections' data in the order in which it arrived.

Epoll's ready list is a queue, but a level-triggered entry that was returned stays in it until the next look, so a
connection that was served a moment ago is returned before others whose data came in earlier. Edge-triggered entries
leave the list when they are returned and come back at its end with new data. What an edge-triggered loop may miss, data
that was left unread, is found by re-arming every returned entry before the next look.
"""

from __future__ import annotations

import asyncio
import logging
import select
import selectors

logger = logging.getLogger(__name__)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop in order of arrival where the system has epoll, else the default loop."""
    if not hasattr(select, "epoll"):
        logger.info("no epoll here: groups of concurrent clients may change places when they arrive within a millisecond")
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(ArrivalSelector())


if hasattr(select, "epoll"):

    class ArrivalSelector(selectors.EpollSelector):
        """An edge-triggered epoll that never loses an event."""

        def __init__(self) -> None:
            super().__init__()
            self._returned: list[int] = []

        def _arm(self, key: selectors.SelectorKey) -> None:
            events = select.EPOLLET
            if key.events & selectors.EVENT_READ:
                events |= select.EPOLLIN
            if key.events & selectors.EVENT_WRITE:
                events |= select.EPOLLOUT
            self._selector.modify(key.fd, events)  # type: ignore[attr-defined]

        def register(self, fileobj, events, data=None):  # type: ignore[no-untyped-def]
            """Watch a file."""
            key = super().register(fileobj, events, data)
            self._arm(key)
            return key

        def modify(self, fileobj, events, data=None):  # type: ignore[no-untyped-def]
            """Watch it for other events."""
            key = super().modify(fileobj, events, data)
            self._arm(key)
            return key

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """What is ready, in the order in which it became so."""
            files = self.get_map()
            for descriptor in self._returned:
                if descriptor in files:
                    self._arm(files[descriptor])
            ready = super().select(timeout)
            self._returned = [key.fd for key, _ in ready]
            return ready
