"""The project's only reader of addresses that users write: of servers, of hosts, and the rules for
proxies.

The functions read text, and only `proxy_trouble` and `proxy_for` read variables of the process.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Annotated
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import httpx
from pydantic import AfterValidator

MAX_ADDRESS_LENGTH = 300
"""Characters of the address of a server."""
MAX_HOST_LENGTH = 253
"""Characters of a host's name."""
MAX_URL_LENGTH = 2000
"""Characters of an address with a path."""
NEEDS_BRACKETS = "an IPv6 address with a port needs brackets: write [::1]:9001"
HOST_NAME = re.compile(r"(?!-)[\w-]{1,63}(\.[\w-]{1,63})*\.?")
EXAMPLE = "write http://HOST:PORT, such as http://localhost:8000"


def server_address(text: str) -> str:
    """Return the address of a server as `http://host:port`, the host in lower case.

    Raises:
        ValueError: the text is not such an address; the message names the fault and an example.
    """
    parts = _read_url(text, EXAMPLE, MAX_ADDRESS_LENGTH)
    if not parts.port:
        raise ValueError(f"{text!r} names no port; {EXAMPLE}")
    if parts.path.strip("/"):
        raise ValueError(
            f"{text!r} goes on after its port; {EXAMPLE}, without /v1 or any other path"
        )
    return f"{parts.scheme}://{authority(str(parts.hostname), parts.port)}"


def http_address(text: str) -> str:
    """Return an address that may have a path, without slashes at its end.

    Raises:
        ValueError: see server_address.
    """
    text = text.strip(" ")
    _read_url(text, EXAMPLE, MAX_URL_LENGTH)
    return text.rstrip("/")


def http_addresses(text: str) -> str:
    """Return addresses with commas between them, each as http_address does. Empty text stays empty.

    Raises:
        ValueError: see server_address; or an address is empty.
    """
    if not text.strip():
        return ""
    if "," in text and not all(part.strip() for part in text.split(",")):
        raise ValueError("an address is empty; write http://A:PORT/v1,http://B:PORT/v1")
    return ",".join(http_address(part) for part in text.split(","))


def host_and_port(text: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `http://host:port`; the host as it stands in a URL.

    >>> host_and_port("localhost:9001"), host_and_port("http://[::1]:9001/")
    (('localhost', 9001), ('[::1]', 9001))

    Raises:
        ValueError: see server_address.
    """
    example = "give host:port, as in localhost:9001 or [::1]:9001"
    if text.lower().startswith("https://"):
        raise ValueError(f"{text!r} is an https address, and these servers speak http; {example}")
    parts = _read_url(_with_scheme(text), example, MAX_ADDRESS_LENGTH, shown=text)
    if not parts.port:
        raise ValueError(f"{text!r} is not an address, for it has no port; {example}")
    if parts.path.strip("/"):
        raise ValueError(f"{text!r} is not a server's address alone, for it has a path; {example}")
    return url_host(str(parts.hostname)), parts.port


def host_name(text: str) -> str:
    """Return a host as it stands in a URL: an IPv6 address in brackets, which the user may leave
    out.

    Raises:
        ValueError: the text is not a host alone.
    """
    example = "give the host alone, such as localhost, 10.0.0.5 or ::1"
    if "://" in text or "/" in text:
        raise ValueError(f"{text[:MAX_ADDRESS_LENGTH]!r} is a URL or a path; {example}")
    bare = re.sub(r"^\[(.*)\]$", r"\1", text)
    if ":" in bare:
        try:
            ip_address(bare)
        except ValueError:
            reason = "is neither a host nor an IPv6 address; leave the port out"
            raise ValueError(f"{text[:MAX_ADDRESS_LENGTH]!r} {reason}; {example}") from None
    elif bare != text or not HOST_NAME.fullmatch(bare) or len(bare) > MAX_HOST_LENGTH:
        raise ValueError(f"{text[:MAX_ADDRESS_LENGTH]!r} is not a host; {example}")
    address = f"http://{url_host(bare)}:80"
    _read_url(address, example, MAX_ADDRESS_LENGTH, shown=text)
    return url_host(bare)


def listening_host(text: str) -> str:
    """Return a host to listen on, as sockets take it: without brackets.

    Raises:
        ValueError: see host_name.
    """
    return host_name(text).strip("[]")


def url_host(host: str) -> str:
    """Return a host as it stands in a URL: an IPv6 address in brackets, and in lower case."""
    bare = host.strip("[]").lower()
    return f"[{bare}]" if ":" in bare else bare


def authority(host: str, port: int) -> str:
    """Return `host:port` as it stands in a URL."""
    return f"{url_host(host)}:{port}"


def _read_url(text: str, example: str, longest: int, shown: str = "") -> SplitResult:
    """Split an address after every check that all kinds of addresses share."""
    quoted = f"{(shown or text)[:MAX_ADDRESS_LENGTH]!r}"
    if len(text) > longest:
        raise ValueError(f"{quoted}… is longer than {longest} characters; {example}")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise ValueError(f"{quoted} holds a space or a control character; {example}")
    try:
        parts = urlsplit(text)
        netloc = parts.netloc.rpartition("@")[2]
        if netloc.count(":") > 1 and "[" not in netloc:
            raise ValueError(NEEDS_BRACKETS)
        host, port = parts.hostname, parts.port
    except (
        ValueError
    ) as error:  # a port that is not a number up to 65535, brackets that do not match
        raise ValueError(f"{quoted} is not an address ({error}); {example}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{quoted} does not begin with http:// or https://; {example}")
    if "@" in parts.netloc:
        raise ValueError(
            "the address holds a name or a password; leave them out: servers are asked with their key"
        )
    if not host:
        raise ValueError(f"{quoted} names no host; {example}")
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"{quoted} names no port; {example}")
    if parts.query or parts.fragment or text.endswith(("?", "#")):
        raise ValueError(f"{quoted} goes on after its port with ? or #; {example}")
    try:
        url = httpx.URL(text)  # a name that no resolver is asked for, such as one with empty labels
        resolved = (
            url.raw_host.decode() if url.host else ""
        )  # `host` decodes xn-- labels, as each request does
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{quoted} is not an address ({error}); {example}") from None
    # Clients raise UnicodeError, which is not an HTTP error, for a label of more than 63
    # characters.
    if ":" not in host and not (HOST_NAME.fullmatch(resolved) and len(resolved) <= MAX_HOST_LENGTH):
        reason = f"a host's name has letters, digits, - and _, at most 63 between dots and {MAX_HOST_LENGTH} in all"
        raise ValueError(f"{quoted} is not an address ({reason}); {example}")
    return parts


def argument(read: Callable[[str], str]) -> Callable[[str], str]:
    """Return a reader of addresses as a `type` of argparse, which then shows the reader's message."""

    def checked(text: str) -> str:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return checked


HttpAddress = Annotated[str, AfterValidator(http_address)]
"""A setting that holds the address of one server, with or without a path."""
HttpAddresses = Annotated[str, AfterValidator(http_addresses)]
"""A setting that holds the addresses of servers, or nothing."""
HostName = Annotated[str, AfterValidator(host_name)]
"""A setting that holds a host, kept as it stands in a URL."""
ServerAddress = Annotated[str, AfterValidator(server_address)]
"""A setting that holds the address of one server, with a port and without a path."""
ListeningHost = Annotated[str, AfterValidator(listening_host)]
"""A setting that holds a host to listen on."""


def proxy_trouble() -> str | None:
    """Return what is wrong with the variables for proxies, in one line; None if HTTP clients can
    read them.

    Clients of libraries in this process, such as the downloader of models, read these variables too
    and fail only when they are made.
    """
    try:
        httpx.Client(verify=False).close()
    except Exception as error:  # noqa: BLE001 (each fault has a class of its own)
        reason = " ".join(str(error).split())
    else:
        return None
    proxies = getproxies_environment()
    faulty = next(
        (
            proxy
            for kind, proxy in proxies.items()
            if kind in ("http", "https", "all") and not _is_proxy(proxy)
        ),
        None,
    )
    if faulty is None and (value := proxies.get("no")):
        return (
            f"the variable NO_PROXY={value[:MAX_ADDRESS_LENGTH]!r} cannot be read ({reason}). "
            "Give names, addresses and domains with commas between, such as "
            "localhost,127.0.0.1,::1,.example.org. Brackets, IPv6 networks and line ends are "
            "refused"
        )
    names = sorted(
        name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")
    )
    return f"the variable {' or '.join(names)} cannot be used ({reason}): give http://HOST:PORT, or unset it"


def _is_proxy(text: str) -> bool:
    """Return whether an HTTP client can be made that uses this proxy."""
    try:
        httpx.Client(proxy=_with_scheme(text), verify=False).close()
    except Exception:  # noqa: BLE001 (each fault has a class of its own)
        return False
    return True


def proxy_for(url: str) -> str | None:
    """Return the proxy that the variables name for a server, or None.

    A NO_PROXY that httpx cannot read is read too.
    """
    parts, proxies = urlsplit(url), getproxies_environment()
    excepted = re.sub(r"[\s,]+", ",", proxies.get("no", "")).replace("[", "").replace("]", "")
    host = parts.hostname or ""
    names = (host, f"{host}:{parts.port}") if parts.port and ":" not in host else (host,)
    if excepted and any(proxy_bypass_environment(name, {"no": excepted}) for name in names):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return proxy and _with_scheme(proxy)


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"http://{address}"


def network_of(address: str) -> str:
    """Return the address, or the /64 network of an IPv6 address: one host may use any address in
    it.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    mapped = getattr(parsed, "ipv4_mapped", None)
    if parsed.version == 4 or mapped is not None:
        return str(mapped or parsed)
    return str(ip_network((int(parsed) >> 64 << 64, 64)))
