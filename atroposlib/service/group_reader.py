"""Reads posted groups, and large ones in a process of their own.

Reading JSON keeps the interpreter to itself until it is done, in whichever thread: while 100 MB are
read, nothing else of the process is answered. So what is large goes through a socket to a child,
which says what `group_schema.read_groups` found. The child ends with its end of the socket, so it
outlives the service in no case.

    python -m atroposlib.service.group_reader FD    # the child
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from atroposlib.service.group_schema import read_groups
from atroposlib.service.records import ValidatedGroup
from atroposlib.service.schemas import InvalidRequestError

logger = logging.getLogger(__name__)

IN_A_PROCESS_FROM = 1 << 20
"""Bytes of a body above which reading it would hold up other requests: about ten milliseconds."""
KEEP_UP_TO = 32 << 20
"""Bytes of a body after which the child ends, and its memory with it."""
MEMORY_PER_BYTE = 20
"""Memory of the child for each byte of the largest body. A group of many long sequences needs
13."""
MEMORY_BESIDES = 256 << 20
"""Memory of the child beyond that, in bytes."""
LOOK_EVERY_SECONDS = 0.05
"""Time between two looks at the child's memory."""
HEAD = struct.Struct("!?Q")
"""Head of a request to the child: True for a list of groups, and the bytes of the body."""
LENGTH = struct.Struct("!Q")


class ReaderError(RuntimeError):
    """The process that reads large posts did not answer."""


class TooComplexError(RuntimeError):
    """Reading a post takes more memory than the process that reads it may have."""


class GroupReader:
    """Reads bodies for an event loop.

    Args:
        timeout: seconds for one large body.
        max_body: bytes of the largest body, from which the bound on the child's memory follows.
    """

    def __init__(self, timeout: float = 60.0, max_body: int = 256 << 20) -> None:
        self.timeout = timeout
        self.child_memory = MEMORY_BESIDES + MEMORY_PER_BYTE * max_body
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="group-reader")
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def read(self, body: bytes, many: bool) -> list[ValidatedGroup]:
        """The groups in a body.

        Raises:
            InvalidRequestError: as `read_groups` does.
            TooComplexError: the child needed more memory than its bound.
            ReaderError: the child ended, or took too long; the next call starts another.
        """
        if len(body) < IN_A_PROCESS_FROM:
            return read_groups(body, many)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, body, many)

    def _ask(self, body: bytes, many: bool) -> list[ValidatedGroup]:
        try:
            sock = self._start()
            sock.sendall(HEAD.pack(many, len(body)))
            sock.sendall(body)
            self._await_answer(sock, len(body))
            head = orjson.loads(_take(sock, *LENGTH.unpack(_take(sock, LENGTH.size))))
            if "errors" in head:
                raise InvalidRequestError(head["errors"])
            groups = [
                _group(fields, _take(sock, fields.pop("n_bytes"))) for fields in head["groups"]
            ]
        except (OSError, EOFError) as error:
            self._stop()
            raise ReaderError(
                f"the process that reads large posts ended or took longer than {self.timeout:g} s "
                f"({type(error).__name__}: {error}); is there enough memory? Post fewer groups at once"
            ) from None
        if len(body) > KEEP_UP_TO:
            self._stop()
        return groups

    def _await_answer(self, sock: socket.socket, length: int) -> None:
        """Wait until the child begins to answer.

        Raises:
            TimeoutError: it took too long.
            TooComplexError: it needed too much memory.
        """
        deadline = time.monotonic() + self.timeout
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(1000 * LOOK_EVERY_SECONDS):
            if self._child is not None and resident_bytes(self._child.pid) > self.child_memory:
                self._stop()
                raise TooComplexError(
                    f"reading this body of {length} bytes takes more than {self.child_memory >> 20} MiB of memory, the bound "
                    "of the process that reads long posts: post fewer groups at once"
                )
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")

    def _start(self) -> socket.socket:
        if self._socket is not None and self._child is not None and self._child.poll() is None:
            return self._socket
        self._stop()
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
            )
        ours.settimeout(self.timeout)
        self._socket = ours
        return ours

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def close(self) -> None:
        """End the child, whatever it does."""
        if self._child is not None:
            self._child.kill()  # whoever waits for it sees its end
        self._thread.submit(self._stop)
        self._thread.shutdown(wait=False)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has now; 0 if it has ended, or if the system does not show
    it.
    """
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _group(fields: dict[str, Any], body: bytes) -> ValidatedGroup:
    weights = tuple((epoch, version) for epoch, version in fields.pop("weights"))
    return ValidatedGroup(body=body, weights=weights, **fields)


def _take(sock: socket.socket, count: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the other side has closed.
        TimeoutError: it was silent for too long.
    """
    taken = bytearray(count)
    view = memoryview(taken)
    while len(view):
        got = sock.recv_into(view)
        if not got:
            raise EOFError("the other side has closed")
        view = view[got:]
    return bytes(taken)


def serve(sock: socket.socket) -> None:
    """Answer until the other side closes."""
    while True:
        try:
            many, count = HEAD.unpack(_take(sock, HEAD.size))
            body = _take(sock, count)
        except EOFError:
            return
        bodies: list[bytes] = []
        try:
            groups = read_groups(body, many)
        except InvalidRequestError as error:
            head = orjson.dumps({"errors": error.errors}, default=str)
        else:
            bodies = [group.body for group in groups]
            names = [
                field.name for field in dataclasses.fields(ValidatedGroup) if field.name != "body"
            ]
            heads = [
                {**{name: getattr(group, name) for name in names}, "n_bytes": len(group.body)}
                for group in groups
            ]
            head = orjson.dumps({"groups": heads})
        sock.sendall(LENGTH.pack(len(head)) + head)
        for part in bodies:
            sock.sendall(part)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the service; this ends when it does
        signal.signal(number, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))
