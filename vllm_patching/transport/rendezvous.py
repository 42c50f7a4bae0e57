"""The store of the trainer at which it meets its receivers, and the watch by which they notice that
the trainer has ended.

PyTorch's TCPStore listens on every address, lists its keys for everyone, and keeps everything that
it receives. This store listens on one address. Both ends prove that they know the secret, which is
never sent; later bytes are not encrypted. Before a connection has proved it, the host reads 64 bytes
from it and keeps nothing.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from vllm_patching.transport.addresses import (
    REACH_SECONDS,
    RendezvousError,
    listening_address,
    reach,
)

NONCE_BYTES = 32
LARGEST_MESSAGE = 16 << 20
"""Bytes. Messages of groups are far smaller."""
SECONDS = struct.Struct("!d")
_COUNT = struct.Struct("!I")


class StoreRefused(RuntimeError):
    """The other end does not know the secret, or its answer is not a store's."""


class StoreTimeout(RuntimeError):
    """The keys were not set in time."""


def new_secret() -> str:
    """Make a secret for one store."""
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: str, side: bytes, ours: bytes, theirs: bytes) -> bytes:
    """Show to the other end that this side knows the secret, without sending it."""
    return hmac.digest(secret.encode(), side + ours + theirs, "sha256")


def joined(parts: Sequence[bytes]) -> bytes:
    """Make one message of byte strings."""
    body = b"".join(_COUNT.pack(len(part)) + part for part in parts)
    return _COUNT.pack(len(body)) + body


def split(body: bytes) -> list[bytes]:
    """Return the byte strings of a message. Raises StoreRefused if they do not fit."""
    parts, at = [], 0
    while at < len(body):
        (size,) = _COUNT.unpack_from(body, at)
        at += _COUNT.size
        if size > len(body) - at:
            raise StoreRefused(f"a part of {size} bytes in a message of {len(body)}")
        parts.append(body[at : at + size])
        at += size
    return parts


def read_bytes(connection: socket.socket, size: int) -> bytes:
    """Read exactly so many bytes. Raises OSError if the other end sends fewer."""
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError(
                "the other end closed the connection, as it does where another secret is used"
            )
        data += more
    return bytes(data)


def read_message(connection: socket.socket) -> list[bytes]:
    """Read one message. Raises OSError, or StoreRefused for one that is too large."""
    (size,) = _COUNT.unpack(read_bytes(connection, _COUNT.size))
    if size > LARGEST_MESSAGE:
        raise StoreRefused(f"a message of {size} bytes, above the limit of {LARGEST_MESSAGE}")
    return split(read_bytes(connection, size))


logger = logging.getLogger(__name__)

PROOF_SECONDS = 10.0
"""A connection that has not proved itself after so long is closed."""
MOST_UNPROVED = 128
"""Connections that may be without a proof at the same time. One more closes the oldest: a peer
needs one round trip."""

_HELLO_BYTES = 2 * NONCE_BYTES
_BACKLOG = 128
_NO_FILES_SECONDS = 0.1


class _Values:
    """Keys and values of a store. Each method is one operation of torch's Store."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: bytes, value: bytes) -> list[bytes]:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        return []

    def get(self, seconds: bytes, key: bytes) -> list[bytes]:
        with self._changed:
            self._wait(seconds, [key])
            return [self._values[key]]

    def wait(self, seconds: bytes, *keys: bytes) -> list[bytes]:
        with self._changed:
            self._wait(seconds, keys)
        return []

    def check(self, *keys: bytes) -> list[bytes]:
        with self._changed:
            return [b"%d" % all(key in self._values for key in keys)]

    def add(self, key: bytes, amount: bytes) -> list[bytes]:
        with self._changed:
            value = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
            self.set(key, value)
        return [value]

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        with self._changed:
            held = self._values.get(key)
            if held == expected or (held is None and not expected):
                self.set(key, desired)
                return [desired]
            return [self._values.get(key, expected)]

    def delete_key(self, key: bytes) -> list[bytes]:
        with self._changed:
            return [b"%d" % (self._values.pop(key, None) is not None)]

    def num_keys(self) -> list[bytes]:
        with self._changed:
            return [b"%d" % len(self._values)]

    def _wait(self, seconds: bytes, keys: Sequence[bytes]) -> None:
        (limit,) = SECONDS.unpack(seconds)
        if not self._changed.wait_for(lambda: all(key in self._values for key in keys), limit):
            missing = b", ".join(key for key in keys if key not in self._values).decode(
                errors="replace"
            )
            raise StoreTimeout(f"not set within {limit:g} s: {missing[:400]}")


_OPERATIONS: dict[bytes, Callable[..., list[bytes]]] = {
    name.encode(): getattr(_Values, name)
    for name in ("set", "get", "wait", "check", "add", "compare_set", "delete_key", "num_keys")
}


class StoreHost:
    """The listening end, in threads of this process. It ends with the object, and its port closes
    then.

    Attributes:
        address, port: where it listens.
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        """
        Args:
            address: an IP address of this machine; empty for all of them.
            port: 0 for any free one.

        Raises:
            OSError: the port is taken, or the address belongs to another machine.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        self.address, self.port = address, int(listening.getsockname()[1])
        ended, end = os.pipe()
        weakref.finalize(self, _end, end)
        threading.Thread(
            target=_accept, args=(listening, ended, secret), name="keyed store", daemon=True
        ).start()


def _end(pipe: int) -> None:
    # A child process may hold the pipe open too: a byte ends the thread where closing alone would
    # not.
    os.write(pipe, b".")
    os.close(pipe)


def _accept(listening: socket.socket, ended: int, secret: str) -> None:
    """Accept connections until a byte comes through a pipe."""
    with selectors.DefaultSelector() as selector:
        acceptor = _Acceptor(listening, secret, selector)
        try:
            acceptor.run(ended)
        finally:
            listening.close()
            os.close(ended)
            acceptor.close()


class _Unproved:
    """A connection that has not shown yet that it knows the secret."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.nonce, self.hello = connection, secrets.token_bytes(NONCE_BYTES), b""
        self.deadline = time.monotonic() + PROOF_SECONDS


class _Acceptor:
    """Accepts connections, and gives each one with a proof a thread."""

    def __init__(
        self, listening: socket.socket, secret: str, selector: selectors.BaseSelector
    ) -> None:
        self._listening, self._secret, self._selector = listening, secret, selector
        self._values, self._refuses = _Values(), False
        self._unproved: dict[socket.socket, _Unproved] = {}  # the oldest first
        self._proved: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def run(self, ended: int) -> None:
        """Serve until `ended` becomes readable."""
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(ended, selectors.EVENT_READ)
        while True:
            oldest = next(iter(self._unproved.values()), None)
            for key, _ in self._selector.select(
                None if oldest is None else max(0.0, oldest.deadline - time.monotonic())
            ):
                if key.fileobj == ended:
                    return
                if key.fileobj is self._listening:
                    self._accept_one()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._unproved:
                    self._read_proof(self._unproved[key.fileobj])
            now = time.monotonic()
            for unproved in [one for one in self._unproved.values() if one.deadline <= now]:
                self._drop(unproved)

    def close(self) -> None:
        """Close every connection, even if a thread reads from it."""
        for connection in [*self._unproved, *self._proved]:
            with suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept_one(self) -> None:
        try:
            connection, _ = self._listening.accept()
            self._refuses = False
        except OSError as error:
            if not self._refuses:
                logger.warning(
                    "[Bridge] the trainer's rendezvous cannot accept connections: %s",
                    error.strerror or error,
                )
            self._refuses = True
            time.sleep(
                _NO_FILES_SECONDS
            )  # without free files, select returns at once again and again
            return
        while len(self._unproved) >= MOST_UNPROVED:
            self._drop(next(iter(self._unproved.values())))
        connection.setblocking(False)
        unproved = _Unproved(connection)
        try:
            connection.send(unproved.nonce)  # the buffer of a new connection has space for it
        except OSError:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ)
        self._unproved[connection] = unproved

    def _read_proof(self, unproved: _Unproved) -> None:
        try:
            more = unproved.connection.recv(_HELLO_BYTES - len(unproved.hello))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        unproved.hello += more
        if not more:
            return self._drop(unproved)
        if len(unproved.hello) < _HELLO_BYTES:
            return
        theirs, shown = unproved.hello[:NONCE_BYTES], unproved.hello[NONCE_BYTES:]
        if not hmac.compare_digest(shown, proof(self._secret, b"peer", unproved.nonce, theirs)):
            return self._drop(unproved)
        self._selector.unregister(unproved.connection)
        del self._unproved[unproved.connection]
        self._proved.add(unproved.connection)
        answer = proof(self._secret, b"host", theirs, unproved.nonce)
        threading.Thread(
            target=_serve,
            args=(unproved.connection, answer, self._values),
            name="keyed store peer",
            daemon=True,
        ).start()

    def _drop(self, unproved: _Unproved) -> None:
        self._selector.unregister(unproved.connection)
        del self._unproved[unproved.connection]
        unproved.connection.close()


def _serve(connection: socket.socket, answer: bytes, values: _Values) -> None:
    """Answer one peer until it leaves."""
    with connection:
        try:
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sendall(answer)
            while True:
                name, *arguments = read_message(connection)
                connection.sendall(joined(_outcome(values, name, arguments)))
        except (OSError, StoreRefused, ValueError) as error:
            logger.debug("a peer of the keyed store has left: %s", error)


def _outcome(values: _Values, name: bytes, arguments: Sequence[bytes]) -> list[bytes]:
    try:
        return [b"ok", *_OPERATIONS[name](values, *arguments)]
    except StoreTimeout as error:
        return [b"late", str(error).encode()]
    except (KeyError, TypeError, ValueError, struct.error) as error:
        return [b"refused", f"{name.decode(errors='replace')[:80]}: {error}".encode()]


_SLACK_SECONDS = 5.0


def connect(host: str, port: int, secret: str, seconds: float) -> socket.socket:
    """Connect to a store, and prove the secret in both directions.

    Raises:
        OSError: the store cannot be reached, or closes the connection since the secret is another
            one.
        StoreRefused: the other end does not know the secret.
    """
    connection = socket.create_connection((host, port), seconds)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs, ours = read_bytes(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + proof(secret, b"peer", theirs, ours))
        if not hmac.compare_digest(
            read_bytes(connection, NONCE_BYTES), proof(secret, b"host", ours, theirs)
        ):
            raise StoreRefused(
                f"what listens at {host}:{port} does not know the secret of this trainer's rendezvous"
            )
    except BaseException:
        connection.close()
        raise
    return connection


class KeyedStore(dist.Store):
    """A peer's end, with a connection of its own. Keep the object for as long as a group uses it.

    torch's groups call it from threads of theirs. A wait holds up every other call of the same
    object.
    """

    def __init__(
        self, host: str, port: int, secret: str, seconds: float, kept: StoreHost | None = None
    ) -> None:
        """
        Args:
            seconds: for connecting, and for later waits without a time of their own.
            kept: the listening end in this process, which is to live as long as this object.

        Raises:
            OSError, StoreRefused: as `connect`.
        """
        super().__init__()
        self.kept = kept
        self.set_timeout(timedelta(seconds=seconds))
        self._where, self._lock = f"{host}:{port}", threading.Lock()
        self._clones: list[KeyedStore] = []
        self._place = host, port, secret
        self._connection = connect(host, port, secret, seconds)

    def set(self, key: str, value: str | bytes) -> None:
        self._call(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        seconds = self._limit()
        return self._call(b"get", SECONDS.pack(seconds), key.encode(), seconds=seconds)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if timeout is not None else self._limit()
        self._call(b"wait", SECONDS.pack(seconds), *(key.encode() for key in keys), seconds=seconds)

    def check(self, keys: list[str]) -> bool:
        return self._call(b"check", *(key.encode() for key in keys))[0] == b"1"

    def add(self, key: str, value: int) -> int:
        return int(self._call(b"add", key.encode(), b"%d" % value)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call(b"compare_set", key.encode(), _bytes(expected), _bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        return self._call(b"delete_key", key.encode())[0] == b"1"

    def num_keys(self) -> int:
        return int(self._call(b"num_keys")[0])

    def clone(self) -> KeyedStore:
        """Return another connection, for a thread of torch's. It is kept with this object."""
        other = KeyedStore(*self._place, self._limit(), self.kept)
        self._clones.append(other)
        return other

    def has_extended_api(self) -> bool:
        return False

    def _limit(self) -> float:
        """Seconds for a wait without a time of its own, as a PrefixStore around this one may have
        set it.
        """
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        return limit.total_seconds()

    def _call(self, *parts: bytes, seconds: float = 0.0) -> list[bytes]:
        with self._lock:
            try:
                self._connection.settimeout(max(self._limit(), seconds) + _SLACK_SECONDS)
                self._connection.sendall(joined(parts))
                outcome, *values = read_message(self._connection)
            except OSError as error:
                # an answer that comes late would be taken for the next one
                self._connection.close()
                raise RuntimeError(f"the rendezvous at {self._where} has gone: {error}") from error
        if outcome == b"ok":
            return values
        text = values[0].decode(errors="replace")
        raise StoreTimeout(text) if outcome == b"late" else StoreRefused(text)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_environment = threading.Lock()


@dataclass(frozen=True)
class Meeting:
    """The place where the members of a cohort meet.

    Attributes:
        host, port: of the trainer's store (MASTER_ADDR and MASTER_PORT), as the members reach it.
        secret: what the store requires of each member. Servers get it over their keyed HTTP route.
    """

    host: str
    port: int
    secret: str = field(repr=False)


def host_store(meeting: Meeting, timeout: float, address: str | None = None) -> KeyedStore:
    """Open the store at which all members meet, in this process.

    Args:
        meeting: with port 0, any free port is taken: the store's `kept.port`.
        timeout: seconds for later waits.
        address: an IP address of this machine to listen on, and no other; empty for every address.
            By default the address that the meeting's host has here.

    Raises:
        RendezvousError: the port is taken, or the address belongs to another machine.
    """
    host, port = meeting.host, meeting.port
    try:
        where = listening_address(host) if address is None else address
        hosted = StoreHost(where, port, meeting.secret)
        return KeyedStore(where or "localhost", hosted.port, meeting.secret, timeout, hosted)
    except (OSError, StoreRefused) as error:
        raise RendezvousError(
            f"cannot open the rendezvous on {host}:{port} ({first_line(error)}). "
            f"Another trainer may still be running; stop it, or set MASTER_PORT to a free port for this trainer."
        ) from error


def connect_store(meeting: Meeting, who: str, timeout: float) -> KeyedStore:
    """Connect to the trainer's store, with a connection of one's own: a wait over one connection
    holds up all others over it.

    Args:
        who: for messages, such as `vLLM rank 0`.
        timeout: seconds, also for each later wait.

    Raises:
        RendezvousError: it cannot be reached in time, or it does not accept the secret.
    """
    host, port = meeting.host, meeting.port
    # Half of the deadline: the trainer's own is as long, so it still gets the error about a wrong
    # address.
    reach(host, port, who, min(REACH_SECONDS, timeout / 2))
    try:
        return KeyedStore(host, port, meeting.secret, timeout)
    except (OSError, StoreRefused) as error:
        raise RendezvousError(
            f"{who} cannot join the trainer's rendezvous at {host}:{port} within {timeout:g} s "
            f"({first_line(error)}); check MASTER_ADDR and MASTER_PORT on the trainer"
        ) from error


class PeerWatch:
    """A watch over the process that hosts a store: when it ends, the kernel closes its connections."""

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        """Raises OSError or StoreRefused if that store is not there."""
        self._socket = connect(meeting.host, meeting.port, meeting.secret, timeout)
        self._socket.setblocking(False)

    def gone(self) -> bool:
        """Return whether the process has ended. A stopped process has not."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


@contextmanager
def quiet_nccl_watchdog() -> Iterator[None]:
    """Make a group whose watchdog reports nothing and ends nothing. By default it aborts the whole
    process, vLLM's worker, when an operation takes too long. The first group of a process writes a
    stack to its log each second once the trainer that holds the store has ended. The deadlines are
    ours.
    """
    # The environment is the whole process's, and lanes are formed side by side.
    with _environment:
        yield from _set_for_a_moment()


def _set_for_a_moment() -> Iterator[None]:
    ours = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def first_line(error: BaseException) -> str:
    """Return the part of torch's errors that helps a person."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
