"""A uvicorn server that ends long answers when it stops."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn


class StoppingServer(uvicorn.Server):
    """Calls `when_stopping` before it waits for requests under way, so that streams and long polls
    end themselves.

    uvicorn would wait for them until its limit and then cancel them, with a traceback in the log
    for each.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.when_stopping: list[Callable[[], None]] = []

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End long answers, then stop as uvicorn does."""
        for call in self.when_stopping:
            call()
        await super().shutdown(sockets)
