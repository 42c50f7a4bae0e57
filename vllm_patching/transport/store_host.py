"""The listening end of a keyed store, in threads of the trainer's process.

Before a connection has proved that it knows the secret, the host reads 64 bytes from it and keeps
nothing.
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
from collections.abc import Callable, Sequence
from contextlib import suppress

from vllm_patching.transport.store_wire import (
    NONCE_BYTES,
    SECONDS,
    StoreRefused,
    StoreTimeout,
    joined,
    proof,
    read_message,
)

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
            return [b"1" if all(key in self._values for key in keys) else b"0"]

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
        return [expected if held is None else held]

    def delete_key(self, key: bytes) -> list[bytes]:
        with self._changed:
            return [b"1" if self._values.pop(key, None) is not None else b"0"]

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
        """Close every connection, also those that a thread reads from."""
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
