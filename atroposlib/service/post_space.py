"""Refuses posts before they would take the disk space that the store keeps for what empties the
queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from atroposlib.service.store import Store, StoreError

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""A measurement of the disk is used for so long, since other programs write there too."""
WAIT_SECONDS = 10.0
"""A post waits for the store to make room no longer than this."""


class PostSpace:
    """Space for the posts that are under way, of a store on a disk that may fill.

    Attributes:
        refusing: the reason why the newest post was refused; None if there is space.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._under_way = 0
        """Bytes of posts that are being read and stored."""
        self._making: asyncio.Task[None] | None = None
        self._made = -float("inf")
        self.refusing: str | None = None

    async def require(self, n_bytes: int) -> None:
        """Return if there is space for a post of so many bytes besides those under way.

        Raises:
            StoreError: there is not; the message names the file, the free space, the reserve and
                the remedy.
        """
        space = self._store.space
        if space is None:
            return
        if time.monotonic() - space.measured > FRESH_SECONDS:
            await asyncio.to_thread(self._store.measure)
        if self._refusal(n_bytes) is not None:
            await self._make_room()
        refusal = self._refusal(n_bytes)
        if refusal is not None:
            if self.refusing is None:
                logger.error("%s", refusal)
            self.refusing = refusal
            raise StoreError(refusal)
        if self.refusing is not None:
            logger.warning("there is space for new groups again")
        self.refusing = None

    def _refusal(self, n_bytes: int) -> str | None:
        space = self._store.space
        return None if space is None else space.refusal(n_bytes + self._under_way)

    async def _make_room(self) -> None:
        """Have the store give back what it can, once for all posts that wait, and not more often
        than `FRESH_SECONDS`.
        """
        if self._making is None or self._making.done():
            if time.monotonic() - self._made < FRESH_SECONDS:
                return
            self._made = time.monotonic()
            self._making = asyncio.create_task(asyncio.to_thread(self._store.make_room))
        await asyncio.wait(
            [self._making], timeout=WAIT_SECONDS
        )  # a stalled disk refuses this post, too

    @contextmanager
    def taken(self, n_bytes: int) -> Iterator[None]:
        """Count a post as under way while the block runs."""
        self._under_way += n_bytes
        try:
            yield
        finally:
            self._under_way -= n_bytes

    def figures(self) -> dict[str, Any] | None:
        """Return the space as it was last measured, for /stats and the page; None for a store that
        needs none.
        """
        space = self._store.space
        if space is None:
            return None
        return {
            "path": str(space.path),
            "free_bytes": space.free,
            "reserve_bytes": space.reserve,
            "reserve_is_whole": space.reserve_is_whole,
            "refusing_posts": self.refusing,
        }
