"""A store for process groups that answers only programs with its secret.

PyTorch's TCPStore listens on every address, lists its keys for everyone, and keeps whatever is sent
to it. This store listens on one address. Both ends prove that they know the secret, which is never
sent. Later bytes are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from vllm_patching.transport.store_host import StoreHost
from vllm_patching.transport.store_wire import (
    NONCE_BYTES,
    SECONDS,
    StoreRefused,
    StoreTimeout,
    joined,
    proof,
    read_bytes,
    read_message,
)

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
