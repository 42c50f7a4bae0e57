"""Addresses of inference servers, in one form by which they can be compared. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

LONGEST = 300
"""Characters; a host's name has 253 at most."""


def server_address(text: str) -> str:
    """The address of a server as `http://host:port`, the host in lower case.

    Raises:
        ValueError: it is no such address; says what is wrong with it, and what to write.
    """
    shown = f"{text[:LONGEST]!r}"
    example = "write http://HOST:PORT, such as http://10.0.0.5:9001"
    if len(text) > LONGEST:
        raise ValueError(f"{shown}… is longer than {LONGEST} characters; {example}")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise ValueError(f"{shown} holds a space or a control character; {example}")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # a port that is no number up to 65535, brackets that do not match
        raise ValueError(f"{shown} is no address ({error}); {example}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{shown} does not begin with http:// or https://; {example}")
    if "@" in parts.netloc:
        raise ValueError("the address holds a name or a password; leave them out: servers are asked with their key")
    if not host:
        raise ValueError(f"{shown} names no host; {example}")
    if not port:
        raise ValueError(f"{shown} names no port; {example}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or text.endswith(("?", "#")):
        raise ValueError(f"{shown} goes on after its port; {example}, without /v1 or any other path")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
