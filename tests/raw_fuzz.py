"""Sends random bytes to a server through many connections at a time, and checks each answer and
what the server keeps.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.raw_requests import Attempt, Target, attempt

AT_ONCE = 96
"""Connections at a time."""
PAUSE = 0.002
"""Seconds between the pieces of a request."""
QUIET = 0.3
"""Seconds without a byte, after at least one whole answer, after which a client leaves."""
HANG_SECONDS = 240.0
"""A connection that still waits for its answer or its end after this time hangs. The servers' own
limits are shorter."""
REFUSALS = frozenset({503, 507})
"""The documented answers above 499."""
FAULTS = re.compile(
    r"Traceback|exception was never retrieved|was never awaited|Task was destroyed|Exception in"
)
"""Lines of a log that only a fault of the server causes."""
CLOSED_BY_SERVER = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ECONNABORTED})
"""Errors of a socket whose peer has closed the connection while the client still writes."""
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass
class Outcome:
    """Counts of one run.

    Attributes:
        statuses: of the answers.
        faults: one line for each attempt that went wrong.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def open_files(pid: int) -> int:
    """Count the open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def faults_in(log: Path) -> list[str]:
    """Return the lines of a log that only a fault of the server causes, each with the lines after
    it.
    """
    lines = log.read_text(errors="replace").splitlines()
    return [
        "\n".join(lines[number : number + 40])
        for number, line in enumerate(lines)
        if FAULTS.search(line)
    ]


def run(
    address: tuple[str, int],
    targets: Sequence[Target],
    seed: int,
    numbers: Sequence[int],
    leaves_after: float | None = None,
) -> Outcome:
    """Send the attempts of a seed with these numbers.

    Args:
        leaves_after: seconds after which a client leaves that waits for the end of a connection;
            None: such a connection hangs after HANG_SECONDS. A short run has no time to wait for
            the limits of a server that holds half requests for long.
    """
    outcome = Outcome()
    left = iter(numbers)

    async def client() -> None:
        for number in left:
            tried = attempt(seed, number, targets, f"{address[0]}:{address[1]}")
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    answers = await _send(address, tried, leaves_after)
                fault = _fault_of(answers, outcome.statuses)
            except TimeoutError:
                fault = f"no answer and no end of the connection within {HANG_SECONDS:g} s"
            if fault:
                outcome.faults.append(f"seed {seed}, input {number}: {fault}\n  {tried}")

    async def all_clients() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(client())

    asyncio.run(all_clients())
    return outcome


def _fault_of(answers: bytes, statuses: Counter[int]) -> str:
    """Describe what is wrong with the bytes of some answers; an empty text if nothing is."""
    for status in map(int, STATUS.findall(answers)):
        statuses[status] += 1
        if status >= 500 and status not in REFUSALS:
            return f"answered {answers[-1000:]!r}"
    return "" if not answers or STATUS.match(answers) else f"answered no HTTP: {answers[:300]!r}"


async def _send(address: tuple[str, int], tried: Attempt, leaves_after: float | None) -> bytes:
    """Send one attempt, and return all bytes of the answers."""
    sock = socket.socket()
    sock.setblocking(False)
    received = bytearray()
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
        reading = asyncio.ensure_future(_read(sock, received))
        try:
            await _write(sock, tried.pieces)
            if tried.end == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif tried.end == "half close":
                sock.shutdown(socket.SHUT_WR)
            if tried.end in ("read", "half close"):
                with suppress(TimeoutError):
                    async with asyncio.timeout(leaves_after):
                        await _until_answered(reading, received)
        finally:
            reading.cancel()
            await asyncio.wait({reading})
    except OSError as error:
        if error.errno not in CLOSED_BY_SERVER:
            raise
    finally:
        sock.close()
    return bytes(received)


async def _write(sock: socket.socket, pieces: Sequence[bytes]) -> None:
    for number, piece in enumerate(pieces):
        if number:
            await asyncio.sleep(PAUSE)
        await asyncio.get_running_loop().sock_sendall(sock, piece)


async def _read(sock: socket.socket, received: bytearray) -> None:
    try:
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            received += data
    except ConnectionError:
        return


async def _until_answered(reading: asyncio.Future[None], received: bytearray) -> None:
    """Wait until the server closes the connection, or is quiet after an answer."""
    count = -1
    while not reading.done():
        if len(received) == count and set(STATUS.findall(received)) - {b"100"}:
            return
        count = len(received)
        await asyncio.wait({reading}, timeout=QUIET)
