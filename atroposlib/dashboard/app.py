"""The page as an ASGI application, for the rollout service and for `view-run`. It has its pages,
the data for their scripts (GET /ui/api/…), static files, the sign-in, and the form of refusals.

The page's own threads read files, never the event loop.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import hashlib
import io
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from atroposlib.dashboard.auth import API, PREFIX, SIGN_IN, PageAuth, PageAuthMiddleware, safe_next
from atroposlib.dashboard.events import number
from atroposlib.dashboard.live.hub import EventStream, Hub
from atroposlib.dashboard.live.monitor import LiveSource
from atroposlib.dashboard.live.servers import Server, read_versions
from atroposlib.dashboard.live.stack import Sighting, read_processes, signs_of
from atroposlib.dashboard.rollouts.archive import (
    ORDERS,
    Archive,
    ArchiveError,
    NoSuchError,
    Position,
)
from atroposlib.dashboard.rollouts.files import OpenArchives
from atroposlib.dashboard.rollouts.rollout_stats import entries_of
from atroposlib.dashboard.rollouts.transcript import described, transcript
from atroposlib.dashboard.run_folders.columns import MAX_POINTS, MIN_POINTS, Series
from atroposlib.dashboard.run_folders.runs import (
    LIVE,
    Change,
    Run,
    RunCatalogue,
    RunFiles,
    UnknownRunError,
    modified,
    read_object,
)
from atroposlib.web.middleware import HTTPRefusal, accepts_gzip

logger = logging.getLogger(__name__)
T = TypeVar("T")

STATIC = Path(__file__).parent / "static"
FOLLOW_SECONDS = 1.0
"""Seconds between two readings of the files of a run that a page shows."""
THREADS = 2
"""Threads that read files for the page, and as many that search rollouts. They are its own: however
many pages are open, the service's threads stay free, and charts do not wait for a search."""
GZIP_FROM, GZIP_LEVEL = 1000, 1
"""Bytes of an answer that is compressed; numbers compress nearly as well at this level as at
any."""


class RunPage:
    """One page, over the runs that it shows.

    Args:
        roots: folders of runs.
        auth: access rules.
        hub: of the pages that are open.
        live: the service that serves it and reports to the same hub; None for a page of files.
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
                except UnknownRunError:
                    continue  # its folder is gone; the page shows that at its next request
                except Exception:
                    logger.exception("the page could not read the files of %s; it tries again", run)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Do what reads files, or computes for long, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def answer(
        self, request: Request, ask: Callable[[], Any], of_rollouts: bool = False
    ) -> Response:
        """Return the result of `ask` as JSON. The call, the encoding and the compression run in a
        thread.

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


MAX_NAMES = 200
"""Figures of one request."""
BEST_SECONDS = 0.5
"""Time for one answer to read the rewards of all runs. The page repeats the request until all are
read."""
MAX_TOKENS = 10_000
"""Tokens of a rollout in one answer."""
CLOCK_SECONDS = 5.0
"""Difference between the clocks of two machines that is ignored."""
MAX_VERSIONS = 10_000
"""Versions in one answer, of all servers of a run."""
MAX_QUERY_LENGTH = 400
"""Characters that a list of rollouts is searched for."""


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


class SeriesQuery(BaseModel):
    """Query of the routes of figures."""

    names: Annotated[list[str], BeforeValidator(_split)] = Field([], max_length=MAX_NAMES)
    points: int = Field(2000, ge=MIN_POINTS, le=MAX_POINTS)
    first: float = -math.inf
    last: float = math.inf


class ListQuery(BaseModel):
    """Query of a list of rollouts."""

    sort: str = Field("newest", pattern=f"^({'|'.join(ORDERS)})$")
    environment: str | None = None
    text: str = Field("", max_length=MAX_QUERY_LENGTH)
    cursor: Annotated[Position, BeforeValidator(Position.parse)] | None = None
    limit: int = Field(50, ge=0)


class PartQuery(BaseModel):
    """Query of the tokens of a rollout."""

    begin: int = Field(0, ge=0)
    count: int = Field(2000, ge=0)


Query = TypeVar("Query", bound=BaseModel)


def query_of(request: Request, model: type[Query]) -> Query:
    """Return the checked query of a request. An empty parameter counts as missing."""
    sent = {name: value for name, value in request.query_params.items() if value}
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        fault = error.errors()[0]
        name = fault["loc"][0]
        raise HTTPRefusal(400, f"{name}={sent[str(name)][:50]}: {fault['msg']}") from None


Handler = Callable[[Request], Awaitable[Response]]


def of_run(read: Callable[[Run], Any]) -> Handler:
    """Return a handler that answers with `read` of the run in the query."""

    async def handler(request: Request) -> Response:
        page, run_id = page_of(request), run_id_of(request)
        return await page.answer(request, lambda: read(page.runs.get(run_id)))

    return handler


def run_id_of(request: Request) -> str:
    """Return the run in the query; empty for the default one."""
    return request.query_params.get("run", "")


async def about(request: Request) -> Response:
    """GET /ui/api/page: the page itself."""
    page = page_of(request)
    return json_answer(await page.in_thread(describe, page))


async def runs(request: Request) -> Response:
    """GET /ui/api/runs: a summary of each run."""
    page = page_of(request)
    return await page.answer(
        request, lambda: {"runs": page.runs.summaries(), "current": page.runs.default()}
    )


async def best(request: Request) -> Response:
    """GET /ui/api/best: the best reward of each run."""
    page = page_of(request)
    return await page.answer(request, lambda: {"best": page.runs.best_rewards(BEST_SECONDS)})


async def series(request: Request) -> Response:
    """GET /ui/api/series: figures of a run by step, thinned out to a number of points."""
    query = query_of(request, SeriesQuery)

    def read(run: Run) -> dict[str, Any]:
        points = run.series(query.names, query.points, query.first, query.last)
        return run.extent() | {"newest": run.newest(query.names)} | series_json(points)

    return await of_run(read)(request)


async def table(request: Request) -> Response:
    """GET /ui/api/series.csv: figures of a run as a file."""
    page, names, run_id = page_of(request), query_of(request, SeriesQuery).names, run_id_of(request)

    def write() -> Response:
        run = page.runs.get(run_id)
        text = csv_of(run.series(names or run.names(), MAX_POINTS))
        headers = {"Content-Disposition": f'attachment; filename="{run.files.id}.csv"'}
        return Response(text, headers=headers, media_type="text/csv")

    return await page.in_thread(write)


def events(run: Run) -> dict[str, Any]:
    """GET /ui/api/events: the events of a run."""
    listed, left_out = run.events()
    return {"events": [event.to_json() for event in listed], "left_out": left_out}


async def stack(request: Request) -> Response:
    """GET /ui/api/stack: the processes and queues of a run."""
    page, run_id = page_of(request), run_id_of(request)
    if page.live is not None and run_id in ("", LIVE):
        return json_answer(page.live.stack or {"live": True, "time": None})
    return await page.answer(request, lambda: kept_stack(page.runs.files(run_id), time.time()))


async def weights(request: Request) -> Response:
    """GET /ui/api/weights: the weight versions of each server, and the updates."""
    page, run_id = page_of(request), run_id_of(request)
    servers = None
    if page.live is not None and run_id in ("", LIVE):
        servers = [server.weights() for server in page.live.watch.servers.values()]

    def read() -> dict[str, Any]:
        run = page.runs.get(run_id)
        return weights_json(run, servers, kept_parity(page, run))

    return await page.answer(request, read, of_rollouts=True)


async def stream(request: Request) -> Response:
    """GET /ui/api/stream: server-sent events about a run."""
    page, headers = page_of(request), request.headers
    run_id = run_id_of(request) or await page.in_thread(page.runs.default)

    def read() -> dict[str, Any]:
        return describe(page) | page.runs.get(run_id).extent()

    hello = await page.in_thread(read)
    if page.hub.full:
        raise HTTPRefusal(503, page.hub.full)
    return EventStream(page.hub, hello["run"], hello, lambda: page.auth.session_ends(headers))


def of_rollouts(read: Callable[[Request, Archive], dict[str, Any]]) -> Handler:
    """Return a handler that answers with `read` of the rollouts of the run in the query."""

    async def handler(request: Request) -> Response:
        page, run_id = page_of(request), run_id_of(request)

        def read_archive() -> dict[str, Any]:
            files = page.runs.files(run_id)
            try:
                content = read(request, page.archives.of(files))
            except OSError as error:
                raise ArchiveError(str(error)) from error
            recorder = page.live and page.live.service.recorder
            left_out = recorder.stats()["left_out"] if recorder and files.id == LIVE else 0
            return content | {"left_out": left_out}

        return await page.answer(request, read_archive, of_rollouts=True)

    return handler


def kept_stack(files: RunFiles, now: float) -> dict[str, Any]:
    """Return the stack of a run from its service's files, with the present state of its processes.

    Args:
        files: of the run.
        now: Unix seconds.
    """
    stack = read_object(files.recorded("stack.json"))
    written = number(stack.get("time"))
    if written is None:
        return {"time": None, "live": False}
    ended = number(read_object(files.recorded("run.json")).get("ended"))
    # A time in the future comes from another clock. If the service's clock is behind, the file's
    # own time is more accurate.
    times = [
        at for at in (written, modified(files.recorded("stack.json"))) if at <= now + CLOCK_SECONDS
    ]
    try:
        signs = signs_of(
            stack, Sighting(now, max(times, default=now), ended, read_processes(files.folder))
        )
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or damaged
        signs = {}
    return stack | {"live": False, "signs": signs}


def describe(page: RunPage) -> dict[str, Any]:
    """Return the service or the folder that the page shows."""
    description: dict[str, Any] = {
        "live": False,
        "run": page.runs.default() or None,
        "name": None,
        "now": time.time(),
        "key": page.auth.sessions is not None,
        "full": page.hub.full or None,
        "service": None,
        "folder": next(map(str, page.runs.roots), None),
    }
    if page.live is not None:
        place = {"name": page.live.place.name, "port": page.live.place.port}
        description |= {"live": True, "name": page.live.files().name, "service": place}
    return description


def series_json(series: Series) -> dict[str, Any]:
    """Return points as the charts take them."""
    bounds = ({}, {}) if series.exact else (series.low, series.high)
    listed = {
        name: {"mean": mean, "low": bounds[0].get(name), "high": bounds[1].get(name)}
        for name, mean in series.mean.items()
    }
    return {"exact": series.exact, "step": series.step, "series": listed}


def csv_of(series: Series) -> str:
    """Return a table with a row for each point."""
    text = io.StringIO()
    rows = csv.writer(text)
    # A name that a spreadsheet would take for a formula is made text.
    rows.writerow(["step", *(re.sub(r"^(?=[=+@\t\r-])", "'", name) for name in series.mean)])
    columns = [column.tolist() for column in series.mean.values()]
    for step, *values in zip(series.step.tolist(), *columns, strict=True):
        rows.writerow([step, *(repr(value).replace("nan", "") for value in values)])
    return text.getvalue()


def weights_json(
    run: Run, servers: list[dict[str, Any]] | None, parity: dict[str, Any] | None
) -> dict[str, Any]:
    """Return weight versions, updates and token comparisons of a run.

    Args:
        run: to report.
        servers: their present state; None for the state in the run's files.
        parity: from `kept_parity`. The sums of the trainer's rows replace it, unless the rows hold
            none or are too many to add up.
    """
    if servers is None:
        servers = past_servers(run)
    each = max(20, MAX_VERSIONS // max(1, len(servers)))
    counts, reported = run.counts(), parity or {}
    names = ("compared", "mismatched", "older")
    sums = counts or [reported.get(name, 0) for name in names]
    return {
        "servers": [server | {"history": server["history"][-each:]} for server in servers],
        "updates": run.updates(),
        "deterministic": {
            "on": counts is not None or parity is not None,
            **dict(zip(names, sums, strict=True)),
            "first": reported.get("first"),
            "kernels": reported.get("kernels"),
        },
    }


def kept_parity(page: RunPage, run: Run) -> dict[str, Any] | None:
    """Return the trainer's report of different tokens; None if there is none, or it cannot be read."""
    try:
        archive = page.archives.kept(run.files)
        return None if archive is None else archive.parity()
    except ArchiveError as error:
        logger.warning("the archive of rollouts cannot be read: %s", error)
        return None


def past_servers(run: Run) -> list[dict[str, Any]]:
    """Return the servers of a run from its files."""
    versions = read_versions(run.files.recorded("servers.jsonl"))
    return [Server.remembered(url, {}, history).weights() for url, history in versions.items()]


def rollouts(request: Request, archive: Archive) -> dict[str, Any]:
    """GET /ui/api/rollouts: a page of a list, in an order, of an environment, with a text."""
    query = query_of(request, ListQuery)
    page = archive.listed(query.sort, query.environment, query.text, query.cursor, query.limit)
    return {
        "rollouts": page.rollouts,
        "next": page.next and str(page.next),
        "searched": page.searched,
        "total": page.total,
        "environments": archive.environments(),
    }


def group(request: Request, archive: Archive) -> dict[str, Any]:
    """GET /ui/api/rollouts/GROUP: the rollouts of a group, each with its numbers and its sampling
    parameters, and the groups before and after it.
    """
    kept = archive.group(number_in_path(request, "group"))
    older, newer = archive.beside(kept.id)
    parameters = entries_of(kept.content, "sampling_params")
    return {
        "group": kept.id,
        "seq": kept.seq,
        "time": kept.time,
        "environment": kept.environment,
        "rollouts": [
            head | {"sampling": described(sampling)}
            for head, sampling in zip(kept.heads, parameters, strict=True)
        ],
        "older": older,
        "newer": newer,
    }


def rollout(request: Request, archive: Archive) -> dict[str, Any]:
    """GET /ui/api/rollouts/GROUP/ROLLOUT?begin=&count=: tokens of a rollout, with the trainer's
    numbers for them; see `transcript`.
    """
    query = query_of(request, PartQuery)
    kept = archive.group(number_in_path(request, "group"))
    index = number_in_path(request, "rollout")
    if index >= len(kept.heads):
        raise NoSuchError(
            f"group {kept.id} has {len(kept.heads)} rollouts, and so no rollout {index}"
        )
    trained = archive.trained(kept.first + index)
    count = min(query.count, MAX_TOKENS)
    return transcript(kept.content, index, archive.text(), trained, query.begin, count) | {
        "group": kept.id,
        "rollout": index,
        "trained_version": trained and trained.weight_version,
    }


def number_in_path(request: Request, name: str) -> int:
    """Return the number of a group or a rollout in the address.

    Raises:
        NoSuchError: it is not a whole number, or larger than the archive's numbers can be.
    """
    text = request.path_params[name]
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise NoSuchError(f"no {name} has this number: {text[:40]!r}")
    return int(text)


HANDLERS: dict[str, Handler] = {
    "page": about,
    "runs": runs,
    "best": best,
    "names": of_run(lambda run: {"names": run.names()}),
    "series": series,
    "series.csv": table,
    "events": of_run(events),
    "evaluations": of_run(lambda run: {"evaluations": run.evaluations()}),
    "stack": stack,
    "weights": weights,
    "stream": stream,
    "rollouts": of_rollouts(rollouts),
    "rollouts/{group}": of_rollouts(group),
    "rollouts/{group}/{rollout}": of_rollouts(rollout),
}
DATA_ROUTES = [
    Route(f"{API}{path}", handler, methods=["GET"]) for path, handler in HANDLERS.items()
]


REFUSALS = {UnknownRunError: 404, NoSuchError: 404, ArchiveError: 503}
"""Error of the layers below -> status of the answer."""


MAX_FORM_BYTES = 8192
TYPES = {
    ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png",
    ".txt": "text/plain; charset=utf-8", ".woff2": "font/woff2", ".ico": "image/x-icon", ".json": "application/json",
}  # fmt: skip
"""Types of the files that are served; other files in the folder are not."""
REVALIDATED = "no-cache"
"""Modules name each other without a version, so the browser asks for each again. The ETag saves
sending it."""


@cache
def static_files() -> dict[str, Path]:
    """Return the served files by their address below /ui/static/.

    A lookup, so that no address leads elsewhere.
    """
    files = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix in TYPES]
    return {path.relative_to(STATIC).as_posix(): path for path in files}


def template_page(template: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a page that is one template."""

    async def handler(request: Request) -> Response:
        return page_of(request).render(request.scope, template)

    return handler


async def show_group(request: Request) -> Response:
    """Show the rollouts of a group."""
    number = number_in_path(request, "group")
    return page_of(request).render(
        request.scope, "rollout.html", page_name="rollouts", group=number
    )


async def to_page(request: Request) -> Response:
    """Redirect to the overview."""
    return RedirectResponse(PREFIX, 307)


async def static(request: Request) -> Response:
    """Send a static file, unless the browser has it."""
    path = static_files().get(request.path_params["path"])
    if path is None:
        return page_of(request).refuse(request.scope, 404, "there is no such file")
    headers = {"Cache-Control": REVALIDATED}
    answer = FileResponse(
        path, media_type=TYPES[path.suffix], headers=headers, stat_result=path.stat()
    )
    tag = answer.headers["etag"]
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers | {"ETag": tag})
    return answer


def sign_in_form(request: Request, target: str, status: int = 200, error: str = "") -> Response:
    """Return the sign-in page."""
    return page_of(request).render(
        request.scope, "sign_in.html", status, error=error, next=target, run=""
    )


async def show_sign_in(request: Request) -> Response:
    """Show the sign-in page to a browser that is not signed in."""
    target = safe_next(request.query_params.get("next", PREFIX))
    if page_of(request).auth.session_ends(request.headers) is None:
        return sign_in_form(request, target)
    return RedirectResponse(target, 303)


async def sign_in(request: Request) -> Response:
    """Check the key in the form, and begin a session."""
    sessions, attempts = page_of(request).auth.sessions, page_of(request).auth.attempts
    if sessions is None:
        return RedirectResponse(PREFIX, 303)
    body = (await request.body())[:MAX_FORM_BYTES]
    form = parse_qs(body.decode(errors="replace"))
    target = safe_next(form.get("next", [PREFIX])[0])
    address = (request.scope.get("client") or ("",))[0]
    wait = attempts.wait(address)
    if wait > 0:
        again = int(wait) + 1
        answer = sign_in_form(
            request, target, 429, f"Too many wrong keys were tried. Try again in {again} seconds."
        )
        answer.headers["Retry-After"] = str(again)
        return answer
    if not sessions.is_key(form.get("key", [""])[0].strip()):
        attempts.failed(address)
        text = "That is not the service's key. It is ROLLOUT_API_KEY where the service was started, or in its key file."
        return sign_in_form(request, target, 401, text)
    answer = RedirectResponse(target, 303)
    answer.set_cookie(
        sessions.cookie,
        sessions.begin(),
        int(sessions.seconds),
        path=PREFIX,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="lax",
    )
    return answer


async def sign_out(request: Request) -> Response:
    """End the session, and the streams of its pages."""
    page = page_of(request)
    answer = RedirectResponse(SIGN_IN, 303)
    if page.auth.sessions is not None:
        page.auth.sessions.end(page.auth.cookie(request.headers))
        page.hub.wake()
        answer.delete_cookie(page.auth.sessions.cookie, path=PREFIX, httponly=True, samesite="lax")
    return answer


PAGE_ROUTES = [
    Route(PREFIX, template_page("overview.html"), methods=["GET"]),
    Route(f"{PREFIX}/", to_page, methods=["GET"]),
    Route(f"{PREFIX}/weights", template_page("weights.html"), methods=["GET"]),
    Route(f"{PREFIX}/history", template_page("history.html"), methods=["GET"]),
    Route(f"{PREFIX}/rollouts", template_page("rollouts.html"), methods=["GET"]),
    Route(f"{PREFIX}/rollouts/{{group}}", show_group, methods=["GET"]),
    Route(SIGN_IN, show_sign_in, methods=["GET"]),
    Route(SIGN_IN, sign_in, methods=["POST"]),
    Route(f"{PREFIX}/sign-out", sign_out, methods=["POST"]),
    Route(PREFIX + "/static/{path:path}", static, methods=["GET"]),
]


async def refuse_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the router, such as an unknown address."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    text = f"the page cannot do that ({status})"
    if status == 404:
        text = "there is nothing at this address"
    answer = page_of(request).refuse(request.scope, status, text)
    answer.headers.update(error.headers or {})
    return answer


async def refuse(request: Request, error: Exception) -> Response:
    """Answer a request that a handler, or a layer below it, refused."""
    status = getattr(error, "status", None) or next(
        status for kind, status in REFUSALS.items() if isinstance(error, kind)
    )
    return page_of(request).refuse(request.scope, status, str(error))


def make_ui(page: RunPage) -> Starlette:
    """Make the application. All its paths begin with /ui."""
    app = Starlette(
        routes=[*PAGE_ROUTES, *DATA_ROUTES],
        middleware=[Middleware(PageAuthMiddleware, auth=page.auth, refuse=page.refuse)],
        exception_handlers={
            HTTPException: refuse_http_error,
            **dict.fromkeys((HTTPRefusal, *REFUSALS), refuse),
        },
    )
    app.state.page = page
    app.router.redirect_slashes = False
    return app


def make_offline_app(page: RunPage) -> Starlette:
    """Make the application of `view-run`, which serves the page alone."""
    return Starlette(
        routes=[Route("/", to_page), PageRoute(page)], lifespan=lambda _: page.running()
    )


class PageRoute(BaseRoute):
    """The page as a part of another application, which hands it each request for it unchanged.

    A mount would not take /ui itself: it would redirect that address to the host in the Host
    header.
    """

    path = PREFIX
    """Name of all these requests in the service's figures."""

    def __init__(self, page: RunPage) -> None:
        self.app, self.running = make_ui(page), page.running

    @property
    def route(self) -> BaseRoute:
        """Return this route, for the application that it is a part of."""
        return self

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request for the page."""
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == PREFIX or path.startswith(f"{PREFIX}/")):
            return Match.FULL, {"route": self}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the page's application answer a request."""
        await self.app(scope, receive, send)
