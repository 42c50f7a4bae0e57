"""Bytes between a keyed store and its peers: the proof that each knows the secret, and messages of
byte strings.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

NONCE_BYTES = 32
LARGEST_MESSAGE = 16 << 20
"""Bytes. What groups exchange is far smaller."""
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
