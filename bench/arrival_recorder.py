"""Notes in which order posts arrive, are answered and are handed out; in front of a rollout
service, or in its place.

    python bench/arrival_recorder.py --port 9000                    # answers by itself, as little as a load needs
    python bench/arrival_recorder.py --port 9000 --upstream 8000    # passes everything on to the service at port 8000

`GET /recorded` gives what was noted, in seconds of one clock:

    {"posts": {id: [first byte here, last byte here, answer here]}, "handed_out": [id, …]}

By itself it takes groups in the order in which their last bytes came and hands them out eight at a
time in that order, so that the load's own count of inversions is then the count of those in its
arrivals.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # run by path: import from the repository

import argparse
import asyncio
import json
import re
import time
from collections import deque
from dataclasses import dataclass, field

GROUP_ID = re.compile(rb"\[\[\s*(1\d{7})\s*,")
"""The load marks a group by its first token, an eight-digit number; no other token has so many
digits."""
BATCH = 8
"""Groups in a batch of the stand-in."""


@dataclass
class Request:
    """One request on its way through."""

    arrived: float
    path: bytes = b""
    length: int | None = None
    """Bytes of the whole message, once its head is there."""
    data: bytearray = field(default_factory=bytearray)


@dataclass
class Recording:
    """What was seen."""

    posts: dict[int, list[float]] = field(default_factory=dict)
    handed_out: list[int] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    """The stand-in's queue."""


class Recorder(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, recording: Recording, upstream: int | None, pace: float) -> None:
        self.recording, self.upstream, self.pace = recording, upstream, pace
        self.request: Request | None = None
        self.under_way: deque[Request] = deque()
        self.up: asyncio.Transport | None = None
        self.early = bytearray()
        self.answer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come: open a connection to the service for it."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self.upstream is not None:
            self.opening = asyncio.ensure_future(self.open())

    async def open(self) -> None:
        """Connect to the service; what came in the meantime goes first."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: Upstream(self), "127.0.0.1", self.upstream
        )
        self.up = transport
        self.up.write(bytes(self.early))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self.up is not None:
            self.up.close()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request. The clients send one at a time on a connection."""
        if self.request is None:
            self.request = Request(time.perf_counter())
        request = self.request
        request.data += data
        if request.length is None and (end := request.data.find(b"\r\n\r\n")) >= 0:
            head = bytes(request.data[:end])
            request.path = head.split(b" ", 2)[1]
            found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            request.length = end + 4 + (int(found.group(1)) if found else 0)
        own = request.path == b"/recorded"
        if self.upstream is not None and not own:
            if self.up is None:
                self.early += data
            else:
                self.up.write(data)
        if request.length is not None and len(request.data) >= request.length:
            self.request = None
            self.complete(request)

    def complete(self, request: Request) -> None:
        """A whole request is there."""
        if request.path == b"/scored_data" and (found := GROUP_ID.search(request.data)):
            number = int(found.group(1))
            self.recording.posts[number] = [request.arrived, time.perf_counter(), 0.0]
            request.data = bytearray(str(number).encode())
            self.recording.waiting.append(number)
        if request.path == b"/recorded":
            self.reply({"posts": self.recording.posts, "handed_out": self.recording.handed_out})
        elif self.upstream is not None:
            self.under_way.append(request)
        elif self.pace and request.path == b"/scored_data":
            asyncio.get_running_loop().call_later(self.pace, self.stand_in, request)
        else:
            self.stand_in(request)

    def answered(self, data: bytes) -> None:
        """Bytes of the service's answer."""
        self.answer += data
        end = self.answer.find(b"\r\n\r\n")
        if end < 0:
            return
        found = re.search(rb"content-length: *(\d+)", self.answer[:end], re.IGNORECASE)
        if found is None or len(self.answer) < end + 4 + int(found.group(1)):
            return
        request = self.under_way.popleft()
        self.note(request, bytes(self.answer))
        self.answer.clear()

    def note(self, request: Request, answer: bytes) -> None:
        """Note the answer to a request, before the client can have seen the end of it."""
        if request.path == b"/scored_data":
            self.recording.posts[int(request.data)][2] = time.perf_counter()
        elif request.path == b"/batch":
            self.recording.handed_out += [int(number) for number in GROUP_ID.findall(answer)]

    def reply(self, content: object) -> None:
        """Answer by oneself."""
        body = json.dumps(content).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )

    def stand_in(self, request: Request) -> None:
        """What the load needs of a service, and no more."""
        recording = self.recording
        content: object = {"status": "received"}
        if request.path == b"/register-env":
            content = {"status": "success", "env_id": 0}
        elif request.path == b"/batch":
            ready = (
                [recording.waiting.popleft() for _ in range(BATCH)]
                if len(recording.waiting) >= BATCH
                else []
            )
            content = {"batch": [{"tokens": [[number, 0]]} for number in ready] or None}
        self.note(request, json.dumps(content).encode())
        self.reply(content)


class Upstream(asyncio.Protocol):
    """The connection to the service that belongs to a client's."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer: noted first, so that no client acts on it earlier than is noted."""
        self.recorder.answered(data)
        self.recorder.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The service has closed the connection."""
        self.recorder.transport.close()


async def serve(port: int, upstream: int | None, pace: float) -> None:
    """Serve until killed."""
    recording = Recording()
    server = await asyncio.get_running_loop().create_server(
        lambda: Recorder(recording, upstream, pace), "127.0.0.1", port, backlog=128
    )
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--upstream", type=int, metavar="PORT", help="the service to pass everything on to"
    )
    parser.add_argument(
        "--pace", type=float, default=0.0, help="seconds that the stand-in takes to answer a post"
    )
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.upstream, arguments.pace))


if __name__ == "__main__":
    main()
