"""The cookie of a sign-in: nobody makes one without the key, it ends, and wrong keys are counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.api.gate.attempts import ALL_TRIES, TRIES, Attempts
from atroposlib.ui.web.gatekeeper import host_name, is_loopback, safe_next
from atroposlib.ui.web.sessions import Sessions


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_session_begins_and_ends() -> None:
    clock = Clock()
    sessions = Sessions("key", clock, seconds=60)
    cookie = sessions.begin()
    assert sessions.ends(cookie) == clock.now + 60
    assert Sessions("key", clock, 60).ends(cookie) is not None, "it is good after a restart"
    assert Sessions("other", clock, 60).ends(cookie) is None
    assert Sessions("other", clock).cookie != sessions.cookie, "two services on one host do not disturb each other"
    clock.now += 60
    assert sessions.ends(cookie) is None


def test_a_session_that_was_signed_out_is_over_even_for_a_copy_of_it() -> None:
    clock = Clock()
    sessions = Sessions("key", clock)
    mine, other = sessions.begin(), sessions.begin()
    sessions.end(mine)
    assert sessions.ends(mine) is None
    assert sessions.ends(other) is not None
    sessions.end("nonsense")


@given(st.integers(0, 105), st.characters(codec="utf-8"))
def test_a_cookie_with_one_character_changed_is_none(place: int, character: str) -> None:
    clock = Clock()
    sessions = Sessions("key", clock)
    cookie = sessions.begin()
    place %= len(cookie)
    changed = cookie[:place] + character + cookie[place + 1 :]
    assert (sessions.ends(changed) is not None) == (changed == cookie)


@given(st.text(max_size=200))
def test_no_text_is_a_cookie_or_the_key(text: str) -> None:
    sessions = Sessions("the key", Clock())
    assert sessions.ends(text) is None
    assert sessions.is_key(text) == (text == "the key")


def test_wrong_keys_are_counted_by_address_and_in_all() -> None:
    clock = Clock()
    attempts = Attempts(clock)
    for _ in range(TRIES):
        assert attempts.wait("a") == 0
        attempts.failed("a")
    assert attempts.wait("a") > 0
    assert attempts.wait("b") == 0
    clock.now += attempts.wait("a")
    assert attempts.wait("a") == 0
    for number in range(ALL_TRIES):
        attempts.failed(str(number))
    assert attempts.wait("b") > 0


@given(st.one_of(st.text(max_size=40), st.text("/\\.:ui?#@\t", max_size=20).map(lambda text: "/ui" + text)))
def test_after_the_sign_in_one_goes_nowhere_else(text: str) -> None:
    following = safe_next(text)
    assert following == "/ui" or following.startswith(("/ui/", "/ui?"))
    assert "\\" not in following
    assert not following.startswith("/ui/sign-in")


def test_names_of_this_machine() -> None:
    for name in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(name), name
    for name in (
        "",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "10.0.0.1",
        "::ffff:10.0.0.1",
        "testclient",
    ):
        assert not is_loopback(name), name
    assert host_name("[::1]:8000") == "::1"
    assert host_name("LOCALHOST.:80") == "localhost"
    assert host_name("[") == ""
