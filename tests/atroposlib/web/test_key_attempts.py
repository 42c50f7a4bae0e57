"""Wrong keys are limited by address; an address that works with the right key goes on."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from atroposlib.web.addresses import network_of
from atroposlib.web.middleware import (
    KNOWN_SECONDS,
    TRIES,
    TRY_SECONDS,
    Access,
    Attempts,
    HTTPRefusal,
)
from tests.atroposlib.service.conftest import Service

KEY = "correct-horse-battery-staple"
STRANGER, WORKER = "198.51.100.7", "198.51.100.8"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Keyed:
    """Access with a key, and a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.access = Access(KEY, attempts=Attempts(self.clock, all_tries=None))

    def status(
        self, key: str, client: str = STRANGER, path: str = "/status", scheme: str = "Bearer"
    ) -> int:
        headers = Headers({"authorization": f"{scheme} {key}"} if key else {})
        refusal = None
        try:
            self.access.check("GET", path, headers, client)
        except HTTPRefusal as error:
            refusal = error
        if refusal is None:
            return 200
        assert ("Retry-After" in refusal.headers) == (refusal.status == 429)
        assert KEY not in refusal.detail
        return refusal.status


def test_a_stranger_that_guesses_has_to_wait_even_with_the_right_key() -> None:
    keyed = Keyed()
    assert [keyed.status(f"guess-{n}") for n in range(TRIES + 5)] == [401] * TRIES + [429] * 5
    assert keyed.status(KEY) == 429
    assert keyed.status(KEY, WORKER) == 200
    keyed.clock.now += TRY_SECONDS + 1
    assert keyed.status(KEY) == 200


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/api/stack", "/batch", "/nothing"])
def test_every_path_counts_guesses(path: str) -> None:
    keyed = Keyed()
    for n in range(TRIES):
        keyed.status(f"guess-{n}", path=path)
    assert keyed.status("one-more", path=path) == 429
    assert keyed.status("one-more", path="/status") == 429


def test_a_host_that_works_goes_on_beside_one_that_guesses() -> None:
    keyed = Keyed()
    assert keyed.status(KEY, WORKER) == 200
    assert keyed.status(KEY, "127.0.0.1") == 200
    for client in (WORKER, "127.0.0.1", "::ffff:127.0.0.1"):
        for n in range(TRIES):
            keyed.status(f"guess-{n}", client)
        assert keyed.status("one-more", client) == 429
        assert keyed.status(KEY, client) == 200
    keyed.clock.now += KNOWN_SECONDS
    for n in range(TRIES):
        keyed.status(f"guess-{n}", WORKER)
    assert keyed.status(KEY, WORKER) == 429, "it was away for too long"


def test_a_request_without_a_key_is_not_a_guess() -> None:
    keyed = Keyed()
    assert [keyed.status("") for _ in range(3 * TRIES)] == [401] * (3 * TRIES)
    assert [keyed.status("x", scheme="Basic") for _ in range(3 * TRIES)] == [401] * (3 * TRIES)
    assert keyed.status(KEY) == 200


def test_one_host_with_many_addresses_is_one_host() -> None:
    assert (
        network_of("2001:db8::1") == network_of("2001:db8::ffff") != network_of("2001:db8:0:1::1")
    )
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    keyed = Keyed()
    for n in range(TRIES):
        keyed.status("guess", f"2001:db8::{n + 1}")
    assert keyed.status("guess", "2001:db8::99") == 429


def test_a_real_service_answers_429_with_the_seconds_to_wait(tmp_path: Path) -> None:
    service = Service(
        tmp_path, "--store", "memory", "--host", "127.0.0.1", environ={"ROLLOUT_API_KEY": KEY}
    ).start()
    transport = httpx.HTTPTransport(local_address="127.0.0.9")
    with httpx.Client(
        base_url=f"http://127.0.0.1:{service.port}", transport=transport, timeout=120
    ) as http:
        # The event is the first 429: on a slow machine the earliest guesses may have aged out by
        # then.
        for number in range(100 * TRIES):
            answer = http.get("/status", headers={"authorization": f"Bearer guess-{number}"})
            if answer.status_code == 429:
                break
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.status_code == 429
        assert number >= TRIES
        assert 0 < int(answer.headers["retry-after"]) <= TRY_SECONDS + 1
        assert "wrong keys" in answer.json()["detail"]
        assert http.get("/status", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
