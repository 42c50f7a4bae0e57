"""The limit on wrong keys: the same as the rollout service's, and held by the vLLM server."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.web import middleware as of_service
from vllm_patching.server import access as of_vllm
from vllm_patching.server.access import TRIES, TRY_SECONDS, AskAtTheDoor, Door

ADDRESSES = st.sampled_from(
    (
        "10.0.0.9",
        "::ffff:10.0.0.9",
        "10.0.0.8",
        "2001:db8::1",
        "2001:db8::2",
        "2001:db8:1::",
        "",
        "x",
    )
)
STEPS = st.lists(
    st.tuples(st.sampled_from(("failed", "succeeded", "wait", "is_known", "later")), ADDRESSES),
    max_size=60,
)


@given(STEPS, st.sampled_from((0.5, 7.0, 61.0, 3601.0)))
def test_it_is_the_services(steps: list[tuple[str, str]], seconds: float) -> None:
    now = [1000.0]
    one, other = of_service.Attempts(lambda: now[0], None), of_vllm.Attempts(lambda: now[0])
    for step, address in steps:
        if step == "later":
            now[0] += seconds
        else:
            assert getattr(one, step)(address) == getattr(other, step)(address)


class Server:
    """The middleware in front of an app that lets everything in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._door = AskAtTheDoor(self._app, Door(("sesame",)), lambda: self.now)

    async def status(self, caller: str, token: str, path: str = "/bridge/state") -> tuple[int, str]:
        """Status, and Retry-After, of one request."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"authorization", b"Bearer " + token.encode())] if token else []
        scope = {
            "type": "http", "path": path, "method": "GET", "headers": headers, "client": (caller, 4000),
            "server": ("10.0.0.1", 9001),
        }  # fmt: skip
        await self._door(scope, None, send)
        return sent[0]["status"], dict(sent[0].get("headers", [])).get(b"retry-after", b"").decode()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def test_an_address_that_guesses_has_to_wait_and_learns_nothing_from_the_right_key() -> None:
    server = Server()
    for _ in range(TRIES):
        assert await server.status("10.0.0.9", "wrong") == (401, "")
    assert await server.status("10.0.0.9", "wrong") == (429, "61")
    assert await server.status("10.0.0.9", "sesame") == (429, "61")
    assert await server.status("10.0.0.9", "sesame", "/health") == (429, "61"), (
        "an open path tells no more"
    )
    assert await server.status("10.0.0.9", "", "/health") == (200, "")
    assert await server.status("10.0.0.8", "sesame") == (200, ""), (
        "another address is not concerned"
    )
    server.now = TRY_SECONDS + 1
    assert await server.status("10.0.0.9", "sesame") == (200, "")


async def test_who_has_the_key_works_on_whatever_else_its_address_sends() -> None:
    server = Server()
    assert await server.status("10.0.0.9", "sesame") == (200, "")
    for caller in ("10.0.0.9", "127.0.0.1", "10.0.0.1"):  # the last one is the server's own address
        for _ in range(TRIES + 2):
            await server.status(caller, "wrong")
        assert (await server.status(caller, "wrong"))[0] == 429
        assert await server.status(caller, "sesame") == (200, "")


async def test_requests_without_a_key_are_refused_and_not_counted() -> None:
    server = Server()
    for _ in range(3 * TRIES):
        assert await server.status("10.0.0.9", "") == (401, "")
    assert await server.status("10.0.0.9", "sesame") == (200, "")
