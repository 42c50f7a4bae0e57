#!/usr/bin/env python3
"""A server that answers each request of the load on the rollout service at once: what the load itself
can do. It checks nothing and stores nothing.

    python bench/answer_at_once.py PORT
"""

from __future__ import annotations

import asyncio
import re
import sys

LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
GROUPS_OF_BATCH = 8
ANSWERS = {
    b"/scored_data": b'{"status":"received"}',
    b"/register-env": b'{"status":"success","env_id":0}',
}
"""Path -> answer; others get an empty object."""


class Connection(asyncio.Protocol):
    """One connection, whose requests are answered in their order."""

    posted: list[bytes] = []  # noqa: RUF012 - one for all connections
    """Groups that wait for a batch."""

    def __init__(self) -> None:
        self.read = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are whole."""
        self.read += data
        while (end := self.read.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.read[:end])
            length = LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self.read) < whole:
                return
            body = bytes(self.read[end + 4 : whole])
            del self.read[:whole]
            self.answer(head.split(b" ", 2)[1], body)

    def answer(self, path: bytes, body: bytes) -> None:
        """Answer one request; a batch holds the groups that came first."""
        content = ANSWERS.get(path, b"{}")
        if path == b"/scored_data":
            self.posted.append(body)
        if path == b"/batch":
            batch = b",".join(self.posted[:GROUPS_OF_BATCH])
            del self.posted[:GROUPS_OF_BATCH]
            content = b'{"batch":[%s]}' % batch
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(head % len(content) + content)


async def serve(port: int) -> None:
    """Answer until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
