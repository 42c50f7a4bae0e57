"""Signing in at the page, with a browser."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.atroposlib.dashboard.made_up_run import MadeUpRun
from tests.atroposlib.dashboard.signed_in import KEY, sign_in
from tests.atroposlib.service.conftest import Service
from tests.headless_browser import Visit

pytestmark = pytest.mark.timeout(240)


def test_the_key_lets_in_and_a_wrong_one_does_not(
    made_up: MadeUpRun, visit: Callable[..., Visit]
) -> None:
    stranger = visit(made_up.origin)
    stranger.expect("status of 401")
    page = stranger.page
    sign_in(stranger, "/ui/weights", "a-wrong-key")
    page.get_by_role("alert").filter(has_text="key").wait_for()
    assert page.context.cookies() == []
    assert "a-wrong-key" not in page.content() + page.url
    page.get_by_role("textbox", name="Key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Weights", level=1).wait_for()  # where the person wanted to go
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"] in ("Lax", "Strict"), cookie["path"]) == (
        True,
        True,
        "/ui",
    )
    assert KEY not in cookie["value"]
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    page.goto(f"{made_up.origin}/ui")
    page.get_by_role("heading", name="Sign in").wait_for()


def test_who_comes_from_another_page_is_sent_to_no_other_host(
    made_up: MadeUpRun, visit: Callable[..., Visit]
) -> None:
    lured = visit(made_up.origin)
    sign_in(lured, "/ui/sign-in?next=//evil.example/ui")
    lured.page.get_by_role("navigation", name="Pages").wait_for()


def test_a_session_ends_and_says_so(tmp_path: Path, visit: Callable[..., Visit]) -> None:
    service = Service(
        tmp_path,
        "--store",
        "memory",
        "--ui-session-seconds",
        "10",
        environ={"ROLLOUT_API_KEY": KEY},
    ).start()
    try:
        guest = visit(f"http://127.0.0.1:{service.port}")
        guest.expect("status of 401")
        sign_in(guest, "/ui/weights")
        guest.page.get_by_role("heading", name="Weights", level=1).wait_for()
        guest.page.get_by_role(
            "heading", name="Sign in"
        ).wait_for()  # by itself: the stream reports that the session is over
        assert "next=%2Fui%2Fweights" in guest.page.url
        guest.page.get_by_role("textbox", name="Key").fill(KEY)
        guest.page.keyboard.press("Enter")
        guest.page.get_by_role("heading", name="Weights", level=1).wait_for()
    finally:
        guest.page.context.close()
        service.signal(signal.SIGTERM)
