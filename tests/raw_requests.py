"""Random bytes for the sockets of HTTP servers: mostly requests that are nearly right.

A seed and a number determine each.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_PIPELINED = 24
"""Requests in one connection; the servers allow 16 that wait."""
ENDS = ("read", "read", "read", "leave", "reset", "half close")
"""The client's behaviour after the last byte. Most clients wait for the answer."""


@dataclass(frozen=True)
class Target:
    """A request that a server accepts, from which wrong ones are made."""

    method: str
    path: str
    body: Any = None


@dataclass(frozen=True)
class Attempt:
    """The bytes of one connection.

    Attributes:
        pieces: sent one after the other, with a pause between them.
        end: one of ENDS.
        kinds: the changes that were made, for messages.
    """

    pieces: tuple[bytes, ...]
    end: str
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        sent = b"".join(self.pieces)
        return f"{'; '.join(self.kinds)}; then {self.end}: {len(sent)} bytes in {len(self.pieces)} pieces: {sent[:1500]!r}"


@dataclass
class Draft:
    """A request that the changes work on."""

    method: bytes
    path: bytes
    value: Any
    version: bytes = b"HTTP/1.1"
    lines: list[bytes] = field(default_factory=list)
    body: bytes = b""
    framed: bool = False
    """True if a change has already decided on the length or the transfer encoding."""

    def bytes(self, host: bytes) -> bytes:
        """Return the request."""
        lines = [
            b"%s %s %s" % (self.method, self.path, self.version),
            b"host: " + host,
            *self.lines,
        ]
        if not self.framed and self.body:
            lines.append(b"content-length: %d" % len(self.body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


Change = Callable[[random.Random, Draft], str]

NUMBERS = (
    "1e400",
    "-1e400",
    "NaN",
    "-Infinity",
    "9" * 309,
    "9" * 5000,
    "-0",
    "1e-400",
    str(2**63),
    str(-(2**63) - 1),
)
NUMBERS += (
    str(2**64),
    str(2**53),
    "0.1e",
    "01",
    "+1",
    "0x10",
    "1_000",
    "true",
    "null",
    '""',
    "{}",
    "[]",
    "[[]]",
)
TEXTS = (
    '"\\ud800"',
    '"\\udfff\\ud800"',
    '"\\u0000"',
    '"\\ud83d\\ude00"',
    '"' + "a" * 3000 + '"',
    '"\\x41"',
    '"\t"',
    '"\\',
)
LENGTHS = (
    b"-1",
    b"0x10",
    b"+5",
    b"1e3",
    b"99999999999999999999",
    b"18446744073709551616",
    b"",
    b" ",
    b"5, 5",
    b"5,6",
    b"\xb2",
)
CHUNKS = (
    b"-1",
    b"FFFFFFFFFFFFFFFF",
    b"FFFFFFFFFFFFFFFFF",
    b"0x5",
    b"5 ",
    b" 5",
    b"",
    b"g",
    b"5;a=" + b"b" * 500,
    b"5\n",
    b"7fffffff",
)
CODINGS = (
    b"chunked",
    b"Chunked",
    b"chunked, chunked",
    b"gzip, chunked",
    b"identity",
    b"chunked, gzip",
    b"xchunked",
    b"\x0bchunked",
)
HEADERS = (
    b"expect: 100-continue",
    b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13",
    b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABkAAQAAP__",
    b"no colon in this line",
    b": no name",
    b"na me: x",
    b"name : x",
    b"x: \x00",
    b"x: \xff\xfe",
    b"x: a\r\n folded",
    b"x: a\nb: c",
    b"x: a\rb",
    b"host: other.example",
    b"accept-encoding: gzip;q=0",
    b"accept-encoding: gzip;q=nan, \xe9",
    b"authorization: Bearer \xff",
    b"authorization: " + b"Bearer " * 200,
    b"origin: http://evil.example\r\nsec-fetch-site: cross-site",
    b"content-type: application/json; charset=utf-16",
    b"content-type: multipart/form-data; boundary=",
    b"cookie: " + b"a=b; " * 300,
    b"range: bytes=0-18446744073709551616",
    b"x-forwarded-for: " + b"1.2.3.4, " * 100,
    b"connection: close, keep-alive",
    b"transfer-encoding: chunked\r\ncontent-length: 3",
)
PATHS = (
    b"",
    b"/",
    b"*",
    b"//",
    b"/..%2f..%2fetc/passwd",
    b"/%00",
    b"/%ff%fe",
    b"/%ed%a0%80",
    b"/\xff",
    b"/?\xff=%",
    b"/%",
)
PATHS += (
    b"http://other.example/",
    b"http://[::1",
    b"other.example:443",
    b"/a b",
    b"/" + b"a" * 5000,
    b"/?" + b"a=b&" * 5000,
)
QUERIES = (b"?batch_id=", b"?uuid=", b"?received=", b"?env_id=", b"?after=")
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"PATCH",
    b"CONNECT",
    b"PRI",
    b"get",
    b"",
    b"G\x00T",
    b"A" * 300,
)
VERSIONS = (
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/1.10",
    b"HTTP/",
    b"",
    b"XTTP/1.1",
    b"HTTP/1.1 x",
)


def change_first_line(chance: random.Random, draft: Draft) -> str:
    """Change method, path or version."""
    which = chance.choice(("method", "path", "query", "version"))
    if which == "method":
        draft.method = chance.choice(METHODS)
    elif which == "path":
        draft.path = chance.choice(PATHS)
    elif which == "query":
        draft.path += (
            chance.choice(QUERIES)
            + chance.choice((*NUMBERS, "%ed%a0%80", "%00", "a" * 3000)).encode()
        )
    else:
        draft.version = chance.choice(VERSIONS)
    return which


def change_headers(chance: random.Random, draft: Draft) -> str:
    """Add lines to the head."""
    count = chance.choice((0, 0, 0, 0, 0, 0, 300, 70))
    draft.lines += (
        [chance.choice(HEADERS)]
        if not count
        else [b"x-%d: %s" % (i, b"v" * (10 if count == 300 else 1000)) for i in range(count)]
    )
    return f"{count} more lines" if count else f"line {draft.lines[-1][:40]!r}"


def change_length(chance: random.Random, draft: Draft) -> str:
    """State a length that the body does not have."""
    wrong = (*LENGTHS, *(b"%d" % (len(draft.body) + more) for more in (-1, 1, 1000, 2**28)))
    draft.lines.append(b"content-length: " + chance.choice(wrong))
    draft.framed = chance.random() < 0.7  # else there are two
    return f"{draft.lines[-1][:60]!r}"


def change_transfer(chance: random.Random, draft: Draft) -> str:
    """Send the body in chunks, some of them wrong."""
    size = chance.choice((1, 7, 100, 10_000))
    chunks = [draft.body[at : at + size] for at in range(0, min(len(draft.body), 200 * size), size)]
    coded = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    wrong = chance.random() < 0.6
    if wrong:
        place = chance.randrange(len(coded) + 1)
        coded.insert(
            place,
            chance.choice(CHUNKS)
            + chance.choice((b"\r\n", b"\n", b""))
            + b"x" * chance.randrange(9),
        )
    last = chance.choice(
        (
            b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"0\r\nx: y\r\n\r\n",
            b"0\r\nbad trailer\r\n\r\n",
            b"",
            b"0\r\n",
        )
    )
    draft.lines.append(
        b"transfer-encoding: " + (chance.choice(CODINGS) if chance.random() < 0.4 else b"chunked")
    )
    draft.body, draft.framed = b"".join(coded) + last, True
    return f"chunks of {size}{', one of them wrong' if wrong else ''}"


def change_encoding(chance: random.Random, draft: Draft) -> str:
    """Compress the body, rightly or not."""
    packed = gzip.compress(draft.body, 1, mtime=0)
    kind = chance.choice(
        ("right", "cut", "garbage", "two members", "zeros", "damaged", "header alone", "other")
    )
    if kind == "other":
        draft.lines.append(
            b"content-encoding: "
            + chance.choice((b"br", b"gzip, gzip", b"GZIP ", b"\xff", b"x" * 5000, b"deflate"))
        )
        return "another content-encoding"
    draft.body = {
        "right": packed,
        "cut": packed[: chance.randrange(len(packed))],
        "garbage": b"\x1f\x8b" + chance.randbytes(chance.randrange(5000)),
        "two members": packed + gzip.compress(b" ", mtime=0) + b"\0" * chance.randrange(9),
        "zeros": gzip.compress(bytes(chance.choice((10**5, 3 * 10**6))), 1, mtime=0),
        "damaged": _damaged(chance, packed),
        "header alone": b"\x1f\x8b\x08",
    }[kind]
    draft.lines.append(b"content-encoding: gzip")
    return f"gzip: {kind}"


def _damaged(chance: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        if damaged:
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    return bytes(damaged)


def change_body(chance: random.Random, draft: Draft) -> str:
    """Damage the text of the body."""
    kind = chance.choice(("cut", "bytes", "deep", "twice", "random", "marks", "empty"))
    deep = chance.choice((50, 1_000, 100_000))
    draft.body = {
        "cut": draft.body[: chance.randrange(len(draft.body) + 1)],
        "bytes": _damaged(chance, draft.body),
        "deep": chance.choice((b"[", b'{"a":', b'{"tokens":[')) * deep
        + chance.choice((b"", b"1" + b"]" * deep)),
        "twice": draft.body * 2,
        "random": chance.randbytes(chance.randrange(2000)),
        "marks": chance.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" " * 70_000)) + draft.body,
        "empty": b"",
    }[kind]
    return f"body: {kind}"


def change_value(chance: random.Random, draft: Draft) -> str:
    """Put a wrong value into the JSON of the body, at a random place."""
    mark = "@here@"
    value = json.loads(json.dumps(draft.value if draft.value is not None else {}))
    place = _put(chance, value, mark) if value else ""
    text = chance.choice((*NUMBERS, *TEXTS, "[" * 2000 + "]" * 2000))
    draft.body = (json.dumps(value).replace(f'"{mark}"', text) if place else text).encode()
    return f"{place or 'the body'} = {text[:40]}"


def _put(chance: random.Random, value: Any, mark: str) -> str:
    """Replace something in the value by the mark, and return its place."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    inner = value[key]
    if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
        return f"{key}.{_put(chance, inner, mark)}"
    value[key] = mark
    if isinstance(value, dict) and chance.random() < 0.1:
        value[chance.choice(("", "\x00", "x" * 3000, "__class__"))] = value.pop(key)
    return str(key)


CHANGES: tuple[Change, ...] = (
    change_value,
    change_value,
    change_body,
    change_encoding,
    change_transfer,
    change_length,
)
CHANGES += (change_headers, change_headers, change_first_line)
_ORDER = {change: place for place, change in enumerate(CHANGES)}
"""The body first, then its encoding, then its framing."""


def attempt(seed: int, number: int, targets: Sequence[Target], host: str) -> Attempt:
    """Return one attempt of a run.

    Args:
        seed: of the run.
        number: of the attempt.
        targets: right requests.
        host: for the Host header.
    """
    chance = random.Random(f"{seed} {number}")
    count = chance.randrange(2, MOST_PIPELINED) if chance.random() < 0.12 else 1
    requests, kinds = [], [f"{count} requests"]
    for _ in range(count):
        target = chance.choice(targets)
        body = b"" if target.body is None else json.dumps(target.body).encode()
        draft = Draft(target.method.encode(), target.path.encode(), target.body, body=body)
        changes = chance.sample(
            CHANGES,
            chance.choice((0, 1, 1, 1, 2, 3)) if count == 1 else chance.choice((0, 0, 0, 1)),
        )
        kinds.append(f"{target.method} {target.path}")
        kinds += [change(chance, draft) for change in sorted(changes, key=_ORDER.__getitem__)]
        requests.append(draft.bytes(host.encode()))
    sent = b"".join(requests)
    if chance.random() < 0.1:
        sent = sent[: chance.randrange(1, len(sent))]
        kinds.append("cut")
    return Attempt(tuple(_pieces(chance, sent)), chance.choice(ENDS), tuple(kinds))


def _pieces(chance: random.Random, sent: bytes) -> list[bytes]:
    kind = chance.random()
    if kind < 0.6:
        return [sent]
    if kind < 0.7:
        slow = chance.randrange(200)
        return [
            *(sent[at : at + 1] for at in range(min(slow, len(sent)))),
            *([sent[slow:]] if len(sent) > slow else []),
        ]
    cuts = sorted(chance.randrange(len(sent) + 1) for _ in range(chance.randrange(1, 8)))
    return [
        piece
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)
        if (piece := sent[start:end])
    ]
