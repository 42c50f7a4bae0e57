"""Addresses as users write them, and the variables for proxies."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.inference.client import APIServerConfig
from atroposlib.web.addresses import (
    argument,
    authority,
    host_and_port,
    host_name,
    http_address,
    http_addresses,
    listening_host,
    proxy_for,
    proxy_trouble,
    server_address,
)
from example_trainer.command_line import parse_config
from example_trainer.config import checked_addresses
from example_trainer.errors import ConfigError

READERS: list[Callable[[str], Any]] = [
    server_address, http_address, http_addresses, host_and_port, host_name, listening_host,
]  # fmt: skip
PROXY_NAMES = [
    name
    for kind in ("http", "https", "all", "no")
    for name in (f"{kind}_proxy", f"{kind}_PROXY".upper())
]


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (server_address, "http://[::1]:9001/", "http://[::1]:9001"),
        (server_address, "HTTPS://Host:1", "https://host:1"),
        (http_address, "http://localhost:8000/", "http://localhost:8000"),
        (http_address, "https://service.example/a//", "https://service.example/a"),
        (http_addresses, "http://a:1/v1/, http://[::1]:2", "http://a:1/v1,http://[::1]:2"),
        (http_addresses, "", ""),
        (host_and_port, "[::1]:9001", ("[::1]", 9001)),
        (host_and_port, "http://Localhost:9001/", ("localhost", 9001)),
        (host_and_port, "10.0.0.5:1", ("10.0.0.5", 1)),
        (host_name, "::1", "[::1]"),
        (host_name, "[FD00::2]", "[fd00::2]"),
        (host_name, "node-1.cluster_a.example", "node-1.cluster_a.example"),
        (listening_host, "::", "::"),
        (listening_host, "[::1]", "::1"),
        (listening_host, "0.0.0.0", "0.0.0.0"),
    ],
)
def test_good_addresses(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (http_address, "localhost:8000", "does not begin with http://"),
        (http_address, "http://::1:8000", r"needs brackets: write \[::1\]:9001"),
        (http_address, "http://h:99999", "is not an address"),
        (http_address, "http://h:8000/?a=1", r"with \? or #"),
        (http_address, "http://", "names no host"),
        (http_address, "http://a..b:1", "is not an address"),
        (http_address, "http://u:p@h:1", "leave them out"),
        (http_address, "http://a b:1", "holds a space"),
        (
            server_address,
            f"http://{'a' * 64}:1",
            "at most 63",
        ),  # resolvers raise UnicodeError for it
        (server_address, f"http://{'a.' * 127}:1", "at most 63"),
        (server_address, f"http://{'ß' * 62}:1", "is not an address"),
        (server_address, "http://xn--a:1", "is not an address"),
        (server_address, "http://a%00:1", "letters, digits"),
        (server_address, "http://a,b:1", "letters, digits"),
        (http_addresses, "http://a:1,,http://b:1", "an address is empty"),
        (host_and_port, "::1:9001", "needs brackets"),
        (host_and_port, "https://h:1", "speak http"),
        (host_and_port, "h", "it has no port"),
        (host_and_port, "h:", "names no port"),
        (host_and_port, "h:x", "is not an address"),
        (host_and_port, "h:0", "names no port"),
        (host_and_port, "h:1/v1", "it has a path"),
        (host_and_port, ":9001", "names no host"),
        (host_name, "http://h", "give the host alone"),
        (host_name, "h/", "give the host alone"),
        (host_name, "h:9001", "leave the port out"),
        (host_name, "[::1]:9001", "leave the port out"),
        (host_name, "[h]", "is not a host"),
        (host_name, "", "is not a host"),
        (host_name, "a,b", "is not a host"),
    ],
)
def test_bad_addresses(read: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(text)
    assert "\n" not in str(caught.value)
    if read is not host_and_port:
        with pytest.raises(ArgumentTypeError, match=message):
            argument(read)(text)


@given(st.sampled_from(READERS), st.text(alphabet="htps:/[]1.a-_@?# ,\n%\u00fc\u3002", max_size=24))
@example(host_name, "\u3002")
@example(http_address, "http://[::1%eth0]:1")
@example(http_address, "http://[v1.a]:1")
def test_any_text_is_an_address_or_one_line(read: Callable[[str], Any], text: str) -> None:
    message = ""
    try:
        value = read(text)
    except ValueError as error:
        message = str(error)
    else:
        if read is host_and_port:
            value = f"http://{authority(*value)}"
        elif read in (host_name, listening_host):
            value = f"http://{authority(value, 1)}"
        for address in filter(None, value.split(",")):
            assert httpx.URL(address).host
    assert "\n" not in message


def test_a_server_is_named_once_in_whatever_way() -> None:
    assert checked_addresses(["http://[::1]:1/", "H:2"]) == ["[::1]:1", "h:2"]
    with pytest.raises(ValueError, match="names a server twice"):
        checked_addresses(["localhost:1", "http://localhost:1/"])


def test_settings_of_environments() -> None:
    assert (
        BaseEnvConfig(rollout_server_url="http://[::1]:8000/").rollout_server_url
        == "http://[::1]:8000"
    )
    assert APIServerConfig(base_url="http://h:1/v1/").base_url == "http://h:1/v1"
    assert APIServerConfig(base_url=None).base_url is None
    for bad in ("h:1/v1", "http://::1:1/v1", "http://h:1/v1,"):
        with pytest.raises(ValueError, match="base_url"):
            APIServerConfig(base_url=bad)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NO_PROXY": "localhost,127.0.0.1,::1,.example.org,10.0.0.0/8"}, None),
        ({"NO_PROXY": "localhost,[::1]"}, "NO_PROXY"),
        ({"no_proxy": "fd00::/8"}, "NO_PROXY"),
        ({"NO_PROXY": "localhost\n10.0.0.1"}, "NO_PROXY"),
        ({"HTTP_PROXY": "gopher://p:1"}, "HTTP_PROXY"),
        ({"https_proxy": "http://p:port"}, "https_proxy"),
        ({}, None),
    ],
)
def test_variables_for_proxies(
    variables: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXY_NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trouble = proxy_trouble()
    if message is None:
        assert trouble is None
    else:
        assert trouble is not None
        assert message in trouble
        assert "\n" not in trouble
        with pytest.raises(ConfigError, match=message):
            parse_config(["--model-name", "m"])


@pytest.mark.parametrize(
    ("url", "excepted", "proxied"),
    [
        ("http://judge.example:1/v1", "", True),
        ("http://judge.example:1/v1", "localhost,[::1]", True),
        ("http://judge.example:1/v1", ".example", False),
        ("http://judge.example:1/v1", "localhost\njudge.example", False),
        ("http://judge.example:1/v1", "judge.example:1", False),
        ("http://judge.example:1/v1", "*", False),
        ("http://[fd00::1]:1/v1", "[fd00::1]", False),
        ("http://[fd00::1]:1/v1", "fd00::1", False),
        ("https://judge.example/v1", "", False),
    ],
)
def test_the_proxy_of_a_server(
    url: str, excepted: str, proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXY_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "proxy.example:3128")
    monkeypatch.setenv("no_proxy", excepted)
    assert proxy_for(url) == ("http://proxy.example:3128" if proxied else None)
