"""The common parts of all routes of the page: the runs, the service if there is one, templates."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from atroposlib.dashboard.live.hub import Hub
from atroposlib.dashboard.live.monitor import LiveSource
from atroposlib.dashboard.rollouts.files import OpenArchives
from atroposlib.dashboard.run_folders.catalogue import RunCatalogue, UnknownRunError
from atroposlib.dashboard.run_folders.run import Change, Run
from atroposlib.dashboard.web.auth import API, PageAuth
from atroposlib.web.middleware import accepts_gzip

logger = logging.getLogger(__name__)
T = TypeVar("T")

STATIC = Path(__file__).parent / "static"
FOLLOW_SECONDS = 1.0
"""Seconds between two readings of the files of a run that a page shows."""
THREADS = 2
"""That read files for the page, and as many that search rollouts. They are its own: however many
pages are open, the service's threads stay free, and charts do not wait for a search."""
GZIP_FROM, GZIP_LEVEL = 1000, 1
"""Bytes of an answer that is compressed; numbers compress nearly as well at this level as at
any."""


class RunPage:
    """One page, over the runs that it shows.

    Args:
        roots: folders of runs.
        auth: access rules.
        hub: of the pages that are open.
        live: the service that serves it, which tells the same hub; None for a page of files.
        tokenizer: folder or name of the tokenizer of rollouts that are read from files of groups.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        auth: PageAuth,
        hub: Hub,
        live: LiveSource | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self.auth, self.hub, self.live = auth, hub, live
        self.archives = OpenArchives(tokenizer)
        self.runs = RunCatalogue(
            roots, live.files if live is not None else lambda: None, self._tell
        )
        self._threads = ThreadPoolExecutor(THREADS, "page")
        self._searching = ThreadPoolExecutor(THREADS, "page-rollouts")
        self._jinja = Environment(
            loader=PackageLoader("atroposlib.dashboard"), autoescape=True, undefined=StrictUndefined
        )

    def _tell(self, run: Run, change: Change) -> None:
        for event, data in change.to_json(run):
            self.hub.publish_from_thread(run.files.id, event, data)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """In the block the runs that are shown are followed, each by one reader for all pages that
        show it.
        """
        async with AsyncExitStack() as stack:
            if self.live is not None:
                await stack.enter_async_context(self.live.running())
            following = asyncio.create_task(self._follow())
            try:
                yield
            finally:
                following.cancel()
                await asyncio.wait([following])
                self.hub.close()
                for threads in self._threads, self._searching:
                    threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self) -> None:
        while True:
            for run in self.hub.runs():
                try:
                    await self.in_thread(self.runs.get, run)
                except UnknownRunError:  # its folder is gone; the page says so when it asks again
                    continue
                except Exception:
                    logger.exception("the page could not read the files of %s; it tries again", run)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Do what reads files, or computes for long, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def answer(
        self, request: Request, ask: Callable[[], Any], of_rollouts: bool = False
    ) -> Response:
        """What `ask` returns as JSON. It is asked, written and compressed beside the event loop, on
        which others wait.

        Args:
            of_rollouts: it reads an archive of rollouts.
        """
        packs = accepts_gzip(request.headers)

        def write() -> Response:
            answer = json_answer(ask())
            if packs and len(answer.body) >= GZIP_FROM:
                answer.body = gzip.compress(answer.body, GZIP_LEVEL, mtime=0)
                packed = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
                answer.headers.update(packed | {"Content-Length": str(len(answer.body))})
            return answer

        threads = self._searching if of_rollouts else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, write)

    def render(self, scope: Scope, template: str, code: int = 200, **context: Any) -> HTMLResponse:
        """Return a page from a template.

        Args:
            scope: of the request.
            template: its file name; without a `page_name` in the context, that is the page's name
                too.
            code: the answer's status.
        """
        state = scope.get("state", {})
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"), errors="replace")
        run = query.get("run", [""])[0]
        defaults = {
            "page_name": template.removesuffix(".html").replace("_", "-"),
            "live": self.live is not None,
            "signed_in": bool(state.get("signed_in")),
            "run": run[:200],
            "static": static_address,
        }
        return HTMLResponse(self._jinja.get_template(template).render(defaults | context), code)

    def refuse(self, scope: Scope, status: int, text: str, **more: Any) -> Response:
        """Return a refusal with its reason: JSON for the page's scripts, a page for people."""
        if scope["path"].startswith(API):
            return json_answer({"error": text} | more, status)
        return self.render(scope, "error.html", status, status=status, text=text, run="")


def page_of(request: Request) -> RunPage:
    """Return the page whose application answers a request."""
    page: RunPage = request.app.state.page
    return page


def json_answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer. NaN and infinities become null, and arrays of numbers lists."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers, "application/json")


@cache
def static_address(path: str) -> str:
    """Return the address of a static file.

    It changes with the file, so that the browser uses no file of an older release.
    """
    digest = hashlib.sha256((STATIC / path).read_bytes()).hexdigest()
    return f"/ui/static/{path}?v={digest[:10]}"
