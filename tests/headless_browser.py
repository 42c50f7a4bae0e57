"""A real Chromium without a window, for tests that look at a page as a person does.

Tests find links and buttons by role and name, as a screen reader does, and wait for the page's own
attributes (`data-ready`, `data-connection`). Hidden effects of a page
are noted: lines in the console, errors, refusals of its content security policy,
dialogs, and requests to other hosts. A visit at which any was noted fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Request

VARIABLE = "LOCKSTEP_BROWSER"
"""Names the browser to take; none at all if it is empty."""
PROGRAMS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
INSTALL = "apt-get install --no-install-recommends chromium-headless-shell"
SECONDS = 60.0
"""The longest wait for what a page shows."""
WITHIN_PAGE = ("data", "blob", "about")
"""Schemes of addresses that leave for no host."""
READY = "document.body?.dataset.ready === 'true'"
"""Set by a page once its first data is drawn."""
LIVE = "document.body?.dataset.connection === 'live'"
"""Set while its stream of events is open."""
UNANSWERED = "net::ERR_|Failed to load resource|the service does not answer"
"""Console lines of a page whose service is gone; see Visit.expect."""
TELL_REFUSALS = """document.addEventListener("securitypolicyviolation", (refused) =>
  console.error(`${refused.effectiveDirective} refuses ${refused.blockedURI}: ${refused.sourceFile}:${refused.lineNumber}`));"""


def find_browser() -> str | None:
    """The path of a Chromium; None if this machine has none."""
    if (named := os.environ.get(VARIABLE)) is not None:
        return named or None
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def missing() -> str | None:
    """Why no page can be looked at here, and what to do; None if it can."""
    if find_browser() is None:
        return f"no Chromium on this machine, which this test looks at pages with: {INSTALL}"
    if importlib.util.find_spec("playwright") is None:
        return "no Playwright in this environment, by which tests speak to Chromium: scripts/setup.sh installs it"
    return None


@dataclass
class Visit:
    """One person's window, with cookies of its own.

    Attributes:
        page: what is shown, to be used through Playwright's locators.
        origin: `http://HOST:PORT` of the page.
        noted: hidden effects that no test has announced.
        requests: every address that it asked for.
    """

    page: Page
    origin: str
    noted: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _expected: list[re.Pattern[str]] = field(default_factory=list)

    @classmethod
    def begin(cls, context: BrowserContext, origin: str) -> Visit:
        """Open a window, and note what happens in it from now on."""
        context.set_default_timeout(SECONDS * 1000)
        context.add_init_script(TELL_REFUSALS)
        visit = cls(context.new_page(), origin)
        context.on("request", visit._note_request)
        visit.page.on("console", visit._note_line)
        visit.page.on("pageerror", lambda error: visit.noted.append(f"error: {error}"))
        visit.page.on("dialog", visit._note_dialog)
        visit.page.on("crash", lambda _: visit.noted.append("the page crashed"))
        return visit

    def _note_request(self, request: Request) -> None:
        self.requests.append(request.url)
        address = urlsplit(request.url)
        if (
            address.scheme not in WITHIN_PAGE
            and f"{address.scheme}://{address.netloc}" != self.origin
        ):
            self.noted.append(f"a request to another host: {request.url}")

    def _note_line(self, line: ConsoleMessage) -> None:
        if line.type in ("error", "warning", "assert"):
            self.noted.append(f"console {line.type}: {line.text} ({line.location.get('url', '')})")

    def _note_dialog(self, dialog: Dialog) -> None:
        self.noted.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, path: str) -> None:
        """Go to an address of the page, and wait until its first data is drawn."""
        self.page.goto(self.origin + path)
        self.until(READY)

    def until(self, condition: str, argument: Any = None, seconds: float = SECONDS) -> None:
        """Wait until an expression of JavaScript, or a function of the argument, is true in the
        page.

        Asked from here each time: what Playwright lets the page itself ask would have to get past
        the page's policy.
        """
        from playwright.sync_api import Error

        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.page.evaluate(condition, argument):
                    return
            except Error as error:
                if "context was destroyed" not in error.message:  # by a page that follows this one
                    raise
            assert time.monotonic() < deadline, (
                f"after {seconds:.0f} s at {self.page.url} not yet: {condition}; {self.noted}"
            )
            self.page.wait_for_timeout(30)

    def expect(self, pattern: str) -> None:
        """Allow lines that match at this visit, such as errors about a server that the test kills."""
        self._expected.append(re.compile(pattern))

    def complaints(self) -> list[str]:
        """Return the unexpected notes."""
        return [
            line
            for line in self.noted
            if not any(pattern.search(line) for pattern in self._expected)
        ]

    def end(self) -> list[str]:
        """Close the window; returns what was noted and not expected."""
        self.page.context.close()
        return self.complaints()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests of a module.

    Not of a session: its client runs an event loop, and no coroutine of a test could.
    """
    if (reason := missing()) is not None:
        pytest.skip(reason)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-proxy-server"]
        )
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """A function that begins a visit, which ends with the test: `visit(origin, **options)`, as
    Playwright's `new_context`.
    """
    begun: list[Visit] = []

    def begin(origin: str, **options: Any) -> Visit:
        begun.append(Visit.begin(browser.new_context(**options), origin))
        return begun[-1]

    yield begin
    complaints = [line for one in begun for line in one.end()]
    assert not complaints, complaints
