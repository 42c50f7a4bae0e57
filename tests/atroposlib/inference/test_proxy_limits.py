"""Who may use the managed-server proxy, and how much of it: keys, pages, sizes, numbers and ages of
sessions.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.errors import InferenceUnavailable
from atroposlib.inference.proxy import (
    ProxyLimits,
    Sessions,
    create_app,
    main,
)
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from atroposlib.web.middleware import Access, HTTPRefusal, RequestLimitsMiddleware, openai_answer
from tests.atroposlib.envs.env_stack import OFFLINE
from tests.inference_standin import CONTROLLED

ASK: Any = [{"role": "user", "content": "What is 40 plus 2?"}]
KEY = "sesame"
MODULE = "atroposlib.inference.proxy"


def client(
    tokenizer: Any, limits: ProxyLimits | None = None, base_url: str = "http://127.0.0.1:9100"
) -> httpx.AsyncClient:
    manager = ServerManager(
        [APIServerConfig(base_url="http://127.0.0.1:9/v1", server_type="vllm", health_check=False)]
    )
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(manager, tokenizer, "m", limits)),
        base_url=base_url,
    )


@pytest.fixture
async def http(tokenizer: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The proxy without a key, as it starts by default."""
    async with client(tokenizer) as made:
        yield made


# ---- who may call
# ------------------------------------------------------------------------------------------------------


async def test_a_key_is_wanted_of_everybody_when_there_is_one(tokenizer: Any) -> None:
    async with client(tokenizer, ProxyLimits(Access(KEY, "0.0.0.0"))) as http:
        for method, path in (
            ("GET", "/sessions"),
            ("POST", "/setup"),
            ("GET", "/any/nodes"),
            ("DELETE", "/any"),
        ):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                refused = await http.request(method, path, headers=headers, json={})
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"] == "Bearer"
                assert "bearer token" in refused.json()["error"]["message"]
        http.headers["Authorization"] = f"Bearer {KEY}"
        session = (
            await http.post("/sessions/create", json={}, headers={"Host": "any.name"})
        ).json()["uuid"]
        assert (await http.get(f"/{session}/nodes")).json() == {"nodes": []}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"User-Agent": "Mozilla/5.0"},
    ],
)
async def test_without_a_key_no_web_page_is_served(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    refused = await http.post("/sessions/create", json={}, headers=headers)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == 403
    assert (await http.get("/sessions")).json() == {"sessions": []}


@pytest.mark.parametrize("host", ["localhost:9100", "127.0.0.1", "[::1]:9100"])
async def test_without_a_key_programs_of_this_machine_are_served(
    http: httpx.AsyncClient, host: str
) -> None:
    assert (await http.post("/sessions/create", json={}, headers={"Host": host})).status_code == 200


def test_it_listens_on_this_machine_alone_unless_it_has_a_key(
    monkeypatch: pytest.MonkeyPatch, tokenizer_dir: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[dict[str, Any]] = []
    monkeypatch.setattr(f"{MODULE}.uvicorn.run", lambda app, **options: ran.append(options))
    monkeypatch.delenv("ATROPOS_PROXY_API_KEY", raising=False)
    main(["--tokenizer", str(tokenizer_dir)])
    monkeypatch.setenv("ATROPOS_PROXY_API_KEY", KEY)
    main(["--tokenizer", str(tokenizer_dir)])
    main(["--tokenizer", str(tokenizer_dir), "--host", "10.0.0.7"])
    assert [options["host"] for options in ran] == ["127.0.0.1", "0.0.0.0", "10.0.0.7"]
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert KEY not in shown
    assert "ATROPOS_PROXY_API_KEY" in shown


@pytest.mark.parametrize("flag", ["--max-sessions", "--session-timeout", "--max-body-bytes"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many"])
def test_limits_that_are_none_are_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--tokenizer", "t", f"{flag}={value}"])
    assert f"argument {flag}: {value!r}: " in capsys.readouterr().err


def test_a_proxy_without_a_tokenizer_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--tokenizer is missing: name the served model's" in capsys.readouterr().err


@pytest.mark.e2e
async def test_the_key_reaches_both_ends(
    processes: Any,
    free_port: Callable[[], int],
    shared_inference: str,
    tokenizer_dir: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The environment and another program talk through a proxy that has a key."""
    async with httpx.AsyncClient(timeout=120) as standin:
        await standin.post(f"{shared_inference}/control", json=CONTROLLED)
    port = free_port()
    flags = [
        "--base-url",
        f"{shared_inference}/v1",
        "--tokenizer",
        str(tokenizer_dir),
        "--port",
        str(port),
    ]
    variables = OFFLINE | {"ATROPOS_PROXY_API_KEY": KEY}
    processes.start(
        "proxy", [sys.executable, "-m", MODULE, *flags, "--host", "127.0.0.1"], variables
    )
    address = f"http://127.0.0.1:{port}"
    processes.wait_for_http(address, 180)
    manager = ServerManager([APIServerConfig(base_url="http://not-used")], proxy_url=address)
    monkeypatch.delenv("ATROPOS_PROXY_API_KEY", raising=False)
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        async with manager.managed_server():
            pass
    monkeypatch.setenv("ATROPOS_PROXY_API_KEY", KEY)
    async with manager.managed_server() as managed:
        answer = await managed.chat_completion(messages=ASK, max_tokens=32, temperature=0.0)
        assert answer.choices[0].message.content == "\\boxed{42}"
        async with httpx.AsyncClient(
            base_url=managed.get_url(), headers={"Authorization": f"Bearer {KEY}"}, timeout=120
        ) as theirs:
            assert (
                await theirs.post("/chat/completions", json={"messages": ASK})
            ).status_code == 200
        assert len((await managed.fetch_state())["nodes"]) == 2


# ---- sizes
# -------------------------------------------------------------------------------------------------------------


@given(
    chunks=st.lists(st.binary(max_size=40), max_size=6),
    most=st.integers(1, 60),
    says_length=st.booleans(),
)
def test_a_body_is_passed_on_whole_or_refused_for_its_size(
    chunks: list[bytes], most: int, says_length: bool
) -> None:
    seen: list[bytes] = []
    sent: list[Any] = []
    total = sum(map(len, chunks))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])

    async def receive() -> dict[str, Any]:
        return {
            "type": "http.request",
            "body": left.pop(0) if left else b"",
            "more_body": bool(left),
        }

    async def send(message: Any) -> None:
        sent.append(message)

    left = list(chunks)
    headers = [(b"host", b"localhost")] + (
        [(b"content-length", b"%d" % total)] if says_length else []
    )
    scope = {"type": "http", "method": "POST", "path": "/setup", "headers": headers}
    limits = ProxyLimits(Access(bound_to="127.0.0.1"), max_body=most).of_requests()
    asyncio.run(RequestLimitsMiddleware(app, limits, refuse=openai_answer)(scope, receive, send))
    if total <= most:
        assert (seen, sent) == ([b"".join(chunks)], [])
    else:
        assert seen == []
        assert sent[0]["status"] == 413
        assert b"larger than %d bytes" % most in sent[1]["body"]


async def test_a_body_that_never_comes_is_given_up(tokenizer: Any) -> None:
    async def stalls() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with client(
        tokenizer, ProxyLimits(Access(bound_to="127.0.0.1"), body_seconds=0.05)
    ) as http:
        refused = await http.post("/sessions/create", content=stalls())
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        408,
        "the body did not arrive within 0.05 s",
    )


async def test_too_many_completions_at_once_are_refused(http: httpx.AsyncClient) -> None:
    session = (await http.post("/sessions/create", json={})).json()["uuid"]
    for wrong in ({"n": 10**9}, {"n": 0}, {"max_tokens": 0}):
        assert (
            await http.post(f"/{session}/v1/chat/completions", json={"messages": ASK} | wrong)
        ).status_code == 422


# ---- sessions
# ----------------------------------------------------------------------------------------------------------


async def test_sessions_are_limited_in_number(tokenizer: Any) -> None:
    async with client(tokenizer, ProxyLimits(Access(bound_to="127.0.0.1"), max_sessions=2)) as http:
        opened = [(await http.post("/sessions/create", json={})).json()["uuid"] for _ in range(2)]
        refused = await http.post("/sessions/create", json={})
        assert refused.status_code == 429
        assert "2 sessions are open, as many as may be" in refused.json()["error"]["message"]
        assert (await http.delete(f"/{opened[0]}")).status_code == 200
        assert (await http.post("/sessions/create", json={})).status_code == 200
        gone = await http.get(f"/{opened[0]}/nodes")
        assert gone.status_code == 404
        assert (
            "was ended, or expired 3600 s after its last request" in gone.json()["error"]["message"]
        )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_session_expires_after_its_last_request_but_not_during_one() -> None:
    clock = Clock()
    sessions = Sessions(most=1, seconds=60, clock=clock)
    managed: Any = object()
    made = sessions.create(managed, "m", None)
    for _ in range(3):
        clock.now += 59
        with sessions.used(made.uuid) as session:
            assert session is made
    with sessions.used(made.uuid):
        clock.now += 600
        assert sessions.all() == [made]
        with pytest.raises(HTTPRefusal, match="sessions are open"):
            sessions.create(managed, "m", None)
    clock.now += 60
    assert sessions.all() == [made], "its time began anew when the request ended"
    clock.now += 1
    with pytest.raises(HTTPRefusal, match="not found"), sessions.used(made.uuid):
        pass
    assert sessions.create(managed, "m", None).uuid != made.uuid
    with pytest.raises(HTTPRefusal, match="not found"):
        sessions.delete(made.uuid)


async def test_a_request_that_fails_lets_its_session_expire(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any, **__: Any) -> None:
        raise InferenceUnavailable("gone")

    monkeypatch.setattr("atroposlib.inference.managed_server.ManagedServer.chat_completion", fails)
    clock = Clock()
    limits = ProxyLimits(Access(bound_to="127.0.0.1"), session_seconds=60)
    monkeypatch.setattr(f"{MODULE}.Sessions", lambda most, seconds: Sessions(most, seconds, clock))
    async with client(tokenizer, limits) as http:
        session = (await http.post("/sessions/create", json={})).json()["uuid"]
        assert (
            await http.post(f"/{session}/v1/chat/completions", json={"messages": ASK})
        ).status_code == 503
        clock.now += 61
        assert (await http.get("/sessions")).json() == {"sessions": []}
