"""The cookie of a sign-in: it cannot be made without the key, it ends, and wrong keys are
counted.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.dashboard.auth import Sessions, safe_next
from atroposlib.web.middleware import ALL_TRIES, TRIES, Attempts, host_name, is_loopback


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def kept(path: Path, clock: Clock, key: str = "key", seconds: float = 60) -> Sessions:
    """The sessions of a process that keeps them in this file."""
    sessions = Sessions(key, clock, seconds)
    sessions.keep_in(path)
    return sessions


def test_a_session_begins_and_ends(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "observed" / "sessions.json"
    sessions = kept(file, clock)
    cookie = sessions.begin()
    assert sessions.ends(cookie) == clock.now + 60
    assert kept(file, clock).ends(cookie) is not None, "it is good after a restart"
    assert kept(file, clock, "other").ends(cookie) is None
    assert file.stat().st_mode & 0o777 == 0o600
    assert Sessions("key", clock, 60).ends(cookie) is None, (
        "a service that keeps nothing cannot know who signed out"
    )
    assert Sessions("other", clock, 60).ends(cookie) is None
    assert Sessions("other", clock).cookie != sessions.cookie, (
        "two services on one host do not disturb each other"
    )
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


def test_a_session_that_was_signed_out_is_over_after_a_restart(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "sessions.json"
    sessions = kept(file, clock)
    mine, other = sessions.begin(), sessions.begin()
    sessions.end(mine)
    for _ in range(2):
        sessions = kept(file, clock)
        assert sessions.ends(mine) is None
        assert sessions.ends(other) is not None


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"salt": "", "ended": {}}', '{"salt": "' + "0" * 32 + '", "ended": 1}'],
)
def test_without_a_whole_file_every_session_is_over(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, file = Clock(), tmp_path / "sessions.json"
    cookie = kept(file, clock).begin()
    file.write_text(content)
    sessions = kept(file, clock)
    assert sessions.ends(cookie) is None
    (line,) = caplog.messages
    assert line.startswith(f"{file} cannot be read")
    assert "\n" not in line
    assert kept(file, clock).ends(sessions.begin()) is not None, "the file is whole again"


def test_a_sign_out_that_cannot_be_written_ends_all_sessions_at_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, file = Clock(), tmp_path / "sessions.json"
    sessions = kept(file, clock)
    cookie = sessions.begin()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        sessions.end(cookie)
    assert sessions.ends(cookie) is None
    assert "No space left on device" in caplog.text
    assert kept(file, clock).ends(cookie) is None


def test_a_clock_that_jumps_there_and_back_makes_no_cookie_good_again(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "sessions.json"
    sessions = kept(file, clock)
    cookie = sessions.begin()
    sessions.end(cookie)
    clock.now += 1000
    sessions.end(sessions.begin())
    clock.now -= 1000
    assert sessions.ends(cookie) is kept(file, clock).ends(cookie) is None


def test_more_sign_outs_than_are_remembered_end_all_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.dashboard.auth.MAX_ENDED", 3)
    clock, file = Clock(), tmp_path / "sessions.json"
    sessions = kept(file, clock)
    cookies = [sessions.begin() for _ in range(4)]
    for cookie in cookies:
        sessions.end(cookie)
        assert sessions.ends(cookie) is None
    assert all(
        sessions.ends(cookie) is kept(file, clock).ends(cookie) is None for cookie in cookies
    )


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


@given(
    st.one_of(
        st.text(max_size=40), st.text("/\\.:ui?#@\t", max_size=20).map(lambda text: "/ui" + text)
    )
)
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
