"""The browser that tests look at pages with notes what a person would not see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.headless_browser import SECONDS, Visit, browser, visit

__all__ = ["browser", "visit"]

PAGE = b"""<!doctype html><title>page</title><link rel="icon" href="data:,"><body data-ready="true"><h1>Here</h1>
<script src="/script.js"></script><script>document.title = "inline"</script>"""
SCRIPTS = {
    "/quiet": "document.title = 'quiet'",
    "/said": "console.error('said'); console.log('not noted')",
    "/thrown": "throw new Error('thrown')",
    "/asked": "alert('asked')",
    "/fetched": "fetch('http://127.0.0.2:9/elsewhere').catch(() => {})",
}


class Page(BaseHTTPRequestHandler):
    """A page with an inline script, which its policy refuses, and a script by the last address that
    was asked for.
    """

    script = ""

    def do_GET(self) -> None:
        if self.path in SCRIPTS:
            Page.script = SCRIPTS[self.path]
        is_script = self.path == "/script.js"
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript" if is_script else "text/html")
        self.send_header("Content-Security-Policy", "script-src 'self'")
        self.end_headers()
        self.wfile.write(Page.script.encode() if is_script else PAGE)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it would stand among what tests write."""


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(120)
    server.server_close()


def until_noted(seen: Visit, text: str) -> None:
    """Wait for a complaint, while the browser's client gets its messages."""
    deadline = time.monotonic() + SECONDS
    while not any(text in line for line in seen.complaints()):
        assert time.monotonic() < deadline, seen.noted
        seen.page.wait_for_timeout(10)


@pytest.mark.parametrize(
    ("path", "noted"),
    [("/quiet", ""), ("/said", "console error: said"), ("/thrown", "error: thrown"), ("/asked", "a dialog: asked"),
     ("/fetched", "a request to another host: http://127.0.0.2:9/elsewhere")],
)  # fmt: skip
def test_what_nobody_sees_is_noted(
    origin: str, visit: Callable[..., Visit], path: str, noted: str
) -> None:
    seen = visit(origin)
    seen.open(path)
    assert seen.page.get_by_role("heading", name="Here").is_visible()
    until_noted(seen, "script-src-elem refuses inline")
    seen.expect("script-src-elem refuses inline|inline script violates|Refused to execute inline")
    if noted:
        until_noted(seen, noted)
        seen.expect("said|thrown|asked|127.0.0.2")
    assert seen.complaints() == []
    assert seen.page.title() == ("quiet" if path == "/quiet" else "page")
