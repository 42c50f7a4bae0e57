"""Access: every kind of caller at every kind of path, with a key and without, and with any headers."""

from __future__ import annotations

import argparse
import socket
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from starlette.websockets import WebSocketDisconnect

from vllm_patching.server.access import (
    FROM_AFAR,
    MONITORING,
    READING,
    AskAtTheDoor,
    Asked,
    Door,
    asked_of,
    host_name,
    is_from_here,
    make_door,
)
from vllm_patching.server.routes import LockstepService, attach

PRIVILEGED = (
    "/bridge/init", "/bridge/begin", "/bridge/commit", "/bridge/state", "/lora/load", "/lora/unload", "/pause", "/resume",
    "/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/update_weights", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/abort_requests", "/scale_elastic_ep", "/start_profile", "/docs", "/server_info",
)  # fmt: skip
HEADERS = st.sampled_from(
    (
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"sec-fetch-dest",
        b"authorization",
        b"x-forwarded-for",
        b"forwarded",
        b"user-agent",
    )
)
VALUES = st.one_of(
    st.sampled_from((b"localhost:9001", b"evil.example", b"127.0.0.1", b"http://evil.example", b"null", b"Bearer sesame",
                     b"bearer  sesame", b"Basic sesame", b"cross-site", b"same-origin", b"[::1]:9001", b"http://localhost:9001",
                     b"Mozilla/5.0", b"none", b"navigate", b"cors", b"no-cors", b"document", b"image", b"empty")),
    st.binary(max_size=40),
)  # fmt: skip
ADDRESSES = st.sampled_from(
    ("127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.7", "192.168.1.4", "2001:db8::1", "", "a path")
)
ENDS = st.one_of(st.none(), st.tuples(ADDRESSES, st.one_of(st.none(), st.integers(0, 65535))))
PATHS = st.one_of(
    st.sampled_from((*PRIVILEGED, *sorted(FROM_AFAR), "/v1/responses/r1", "/v1/", "//generate")),
    st.text(max_size=20),
)


@st.composite
def scopes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "type": "http",
        "path": draw(PATHS),
        "method": draw(st.sampled_from(("GET", "POST", "OPTIONS", "DELETE"))),
        "root_path": draw(st.sampled_from(("", "/v1", "/proxy"))),
        "headers": draw(st.lists(st.tuples(HEADERS, VALUES), max_size=6)),
        "client": draw(ENDS),
        "server": draw(ENDS),
    }


@given(scopes())
def test_with_a_key_only_monitoring_is_open(scope: dict[str, Any]) -> None:
    asked = asked_of(scope)
    refusal = Door(("sesame", "other")).refusal(asked)
    let_in = refusal is None
    assert let_in == (
        asked.path in MONITORING
        or asked.method == "OPTIONS"
        or asked.token in (b"sesame", b"other")
    )
    assert refusal is None or (refusal.status == 401 and "sesame" not in refusal.message)


@given(scopes())
def test_without_a_key_nobody_from_afar_changes_anything(scope: dict[str, Any]) -> None:
    asked = asked_of(scope)
    if Door().refusal(asked) is None:
        assert asked.here or asked.path in FROM_AFAR or asked.path.startswith("/v1/responses/")
        assert not asked.host or Door().is_ours(asked.host)
        assert asked.origin is None or (
            asked.host and asked.origin.lower().endswith(f"//{asked.host.lower()}")
        )
        assert asked.fetch_site in (None, "same-origin", "none")
        if asked.method not in ("GET", "HEAD") or asked.path not in READING:
            assert asked.fetch_site != "none"
            assert asked.fetch_mode != "navigate" or asked.method not in ("GET", "HEAD")


@given(scopes())
def test_whoever_came_through_a_proxy_is_from_afar(scope: dict[str, Any]) -> None:
    names = {name for name, _ in scope["headers"]}
    assert not (asked_of(scope).here and names & {b"forwarded", b"x-forwarded-for"})


@given(st.text(max_size=40), st.sampled_from(("", "0.0.0.0", "127.0.0.1", "::1")))
def test_a_host_is_ours_only_if_nobody_can_register_it(host: str, bound_to: str) -> None:
    if Door(bound_to=bound_to).is_ours(host):
        name = host_name(host)
        assert (
            ":" in name
            or name in ("localhost", socket.gethostname().lower())
            or name.replace(".", "").isdigit()
        )


@given(
    st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8}){1,3}", fullmatch=True),
    st.sampled_from(("", ":9001", ".", ".:80")),
)
def test_a_registered_name_is_ours_only_if_it_is_given(name: str, rest: str) -> None:
    assert not Door().is_ours(name + rest)
    assert Door(names=frozenset({name})).is_ours(name + rest)
    assert Door(bound_to=name).is_ours((name + rest).upper())


@pytest.mark.parametrize(
    ("bound_to", "host", "ours"),
    [
        ("", "10.0.0.7:9001", True),
        ("::", "[2001:db8::1]:9001", True),
        ("127.0.0.1", "10.0.0.7:9001", False),
        ("127.0.0.1", "[::1]:9001", True),
        ("10.0.0.7", "10.0.0.7", True),
        ("", f"{socket.gethostname().upper()}:9001", True),
        ("127.0.0.1", "localhost", True),
        ("", "node17.other:9001", False),
        ("", "localhost, evil.example", False),
        ("", "a@localhost", False),
        ("", "[::1", False),
    ],
)
def test_hosts_that_a_server_goes_by(bound_to: str, host: str, ours: bool) -> None:
    assert Door(bound_to=bound_to).is_ours(host) == ours


@pytest.mark.parametrize("path", PRIVILEGED)
def test_what_changes_the_server_answers_this_machine_alone(path: str) -> None:
    door = Door()
    assert door.refusal(Asked(path, "POST", "localhost:9001", here=True)) is None
    refusal = door.refusal(Asked(path, "POST", "10.0.0.1:9001"))
    assert refusal is not None
    assert refusal.status == 403
    assert path in refusal.message
    assert "Set VLLM_API_KEY" in refusal.message


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/chat/completions", "/v1/models", "/metrics", "/v1/responses/r1/cancel"],
)
def test_sampling_and_looking_is_for_whoever_reaches_the_port(path: str) -> None:
    assert Door().refusal(Asked(path, "POST", "10.0.0.1:9001")) is None


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        (
            {"host": "rebound.example:9001"},
            "Host 'rebound.example:9001' is none that this server goes by",
        ),
        ({"origin": "http://localhost:3000"}, "'http://localhost:3000'"),
        ({"method": "POST", "browser": True}, "from a browser that does not name its page"),
        ({"origin": "https://page.example"}, "'https://page.example'"),
        ({"origin": "null"}, "'null'"),
        ({"fetch_site": "cross-site"}, "from another page (Sec-Fetch-Site: cross-site)"),
        ({"fetch_site": "same-site"}, "from another page (Sec-Fetch-Site: same-site)"),
        ({"host": "evil.example", "origin": "http://evil.example"}, "Host 'evil.example'"),
    ],
)
@pytest.mark.parametrize("path", ["/bridge/state", "/generate", "/health"])
def test_pages_of_other_sites_are_refused_even_on_this_machine(
    headers: dict[str, str], why: str, path: str
) -> None:
    refusal = Door().refusal(Asked(path, here=True, **({"host": "localhost:9001"} | headers)))  # type: ignore[arg-type]
    assert refusal is not None
    assert refusal.status == 403
    assert why in refusal.message


@pytest.mark.parametrize(
    "headers",
    [
        {},  # an old client, HTTP/1.0
        {"host": "127.0.0.1:9001"},
        {
            "host": "localhost:9001",
            "origin": "http://localhost:9001",
            "fetch_site": "same-origin",
            "browser": True,
        },
        {"host": "localhost:9001", "browser": True},  # typed by a person into an old browser
        {"host": "10.0.0.1:9001", "origin": "http://10.0.0.1:9001", "fetch_site": "same-origin"},
        {"host": "gpu7.cluster.example:9001"},
        {"host": "localhost:9001", "origin": "https://board.example", "fetch_site": "cross-site"},
        {"host": "localhost:9001", "fetch_site": "none"},  # typed by a person
    ],
)
def test_ordinary_clients_are_let_in(headers: dict[str, str]) -> None:
    door = Door(
        names=frozenset({"gpu7.cluster.example"}), origins=frozenset({"https://board.example"})
    )
    assert door.refusal(Asked("/bridge/state", here=True, **headers)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("client", "server", "here"),
    [
        (("127.0.0.1", 5), ("127.0.0.1", 9001), True),
        (("::ffff:127.0.0.1", 5), ("::ffff:127.0.0.1", 9001), True),
        (("10.0.0.7", 5), ("10.0.0.7", 9001), True),  # by its own address
        (("10.0.0.8", 5), ("10.0.0.7", 9001), False),
        (("::ffff:10.0.0.7", 5), ("10.0.0.7", 9001), True),
        (None, ("/run/vllm.sock", None), True),
        (None, None, True),
        (None, ("10.0.0.7", 9001), False),  # reset before it was read
    ],
)
def test_where_a_connection_comes_from(client: Any, server: Any, here: bool) -> None:
    assert is_from_here(client, server) == here


LINK = {"fetch_site": "none", "fetch_mode": "navigate", "fetch_dest": "document", "browser": True}


@pytest.mark.parametrize(
    "path", [*(path for path in PRIVILEGED if path not in READING), "/generate", "/v1/completions"]
)
def test_a_link_that_a_person_follows_changes_nothing(path: str) -> None:
    for method in ("GET", "HEAD", "POST"):
        refusal = Door().refusal(Asked(path, method, "localhost:9001", here=True, **LINK))  # type: ignore[arg-type]
        assert refusal is not None
        assert refusal.status == 403
        assert "changes something" in refusal.message
        assert Door().refusal(Asked(path, method, "localhost:9001", here=True)) is None


@pytest.mark.parametrize("path", ["/health", "/weights", "/bridge/state", "/v1/models", "/docs"])
def test_a_link_may_be_followed_to_read(path: str) -> None:
    assert Door().refusal(Asked(path, "GET", "localhost:9001", here=True, **LINK)) is None  # type: ignore[arg-type]


def flags(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "api_key": None,
            "host": None,
            "port": 9001,
            "uds": None,
            "allowed_origins": ["*"],
            "allow_host": [],
            **given,
        }
    )


@pytest.mark.parametrize(
    ("given", "variable", "keys", "left"),
    [
        (None, None, (), None),
        (None, "", (), ""),
        (None, "sesame", ("sesame",), "sesame"),
        (["one", "two"], "sesame", ("one", "two"), None),  # as with vLLM, the flag wins
        ([""], "sesame", (), None),
    ],
)
def test_keys_come_from_the_flag_or_the_variable_and_do_not_stay_among_the_flags(
    given: list[str] | None,
    variable: str | None,
    keys: tuple[str, ...],
    left: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = {} if variable is None else {"VLLM_API_KEY": variable}
    args = flags(api_key=given)
    assert make_door(args, environment).keys == keys
    assert args.api_key is None  # vLLM logs the flags that are not as by default
    assert environment.get("VLLM_API_KEY") == left
    said = capsys.readouterr().out
    assert ("--api-key is shown by `ps`" in said) == bool(given)
    assert not any(key in said for key in ("sesame", "one,", "two"))


@pytest.mark.parametrize(
    ("given", "warned"),
    [({}, True), ({"host": "0.0.0.0"}, True), ({"host": "127.0.0.1"}, False), ({"host": "localhost"}, False),
     ({"uds": "/run/vllm.sock"}, False), ({"api_key": ["sesame"]}, False)],
)  # fmt: skip
def test_a_server_that_others_can_reach_without_a_key_says_so(
    given: dict[str, Any], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    make_door(flags(**given), {})
    assert (
        "No VLLM_API_KEY: all that reach port 9001 may sample" in capsys.readouterr().out
    ) == warned


def test_names_and_origins_are_allowed_one_by_one() -> None:
    door = make_door(
        flags(
            allowed_origins=["*", "https://board.example"],
            allow_host=["GPU7.cluster.example."],
            host="b.example",
        ),
        {},
    )
    assert door.origins == {"https://board.example"}
    assert door.is_ours("gpu7.cluster.example:9001")
    assert door.is_ours("b.example")


def make_client(door: Door, caller: str) -> TestClient:
    app = FastAPI()
    attach(app, LockstepService(), door)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    return TestClient(app, base_url="http://10.0.0.1:9001", client=(caller, 4000))


def test_the_app_asks_at_the_door_first() -> None:
    """Before the answer that the engine is loading, and before a body is read."""
    afar = make_client(Door(), "10.0.0.9")
    answer = afar.post("/bridge/init", content=b"no JSON")
    assert answer.status_code == 403
    assert "VLLM_API_KEY" in answer.json()["error"]
    assert afar.post("/generate", json={}).status_code == 503
    near = make_client(Door(), "127.0.0.1")
    assert near.get("/bridge/state").status_code == 503
    assert near.get("/bridge/state", headers={"Origin": "https://page.example"}).status_code == 403
    keyed = make_client(Door(("sesame",)), "10.0.0.9")
    assert keyed.get("/bridge/state").status_code == 401
    assert keyed.post("/generate", json={}).status_code == 401
    assert keyed.get("/bridge/state", headers={"Authorization": "Bearer sesame"}).status_code == 503


def test_a_web_socket_is_closed_before_it_is_open() -> None:
    page = {"Origin": "https://page.example"}
    with (
        pytest.raises(WebSocketDisconnect),
        make_client(Door(), "127.0.0.1").websocket_connect("/v1/realtime", headers=page),
    ):
        pass
    with (
        pytest.raises(WebSocketDisconnect),
        make_client(Door(("sesame",)), "127.0.0.1").websocket_connect("/v1/realtime"),
    ):
        pass


async def test_what_is_no_request_passes() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    await AskAtTheDoor(app, Door(("sesame",)))({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]
