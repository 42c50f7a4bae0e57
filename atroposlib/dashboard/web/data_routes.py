"""GET /ui/api/…: data for the scripts of the page.

The page's own threads read files, never the event loop.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atroposlib.dashboard.events import number
from atroposlib.dashboard.live.hub import EventStream
from atroposlib.dashboard.live.servers import Server, read_versions
from atroposlib.dashboard.live.stack import Sighting, read_processes, signs_of
from atroposlib.dashboard.page import RunPage, json_answer, page_of
from atroposlib.dashboard.rollouts.archive import (
    ORDERS,
    Archive,
    ArchiveError,
    NoSuchError,
    Position,
)
from atroposlib.dashboard.rollouts.rollout_stats import entries_of
from atroposlib.dashboard.rollouts.transcript import described, transcript
from atroposlib.dashboard.run_folders.catalogue import LIVE
from atroposlib.dashboard.run_folders.columns import MAX_POINTS, MIN_POINTS, Series
from atroposlib.dashboard.run_folders.folder import RunFiles, modified, read_object
from atroposlib.dashboard.run_folders.run import Run
from atroposlib.dashboard.web.auth import API
from atroposlib.web.middleware import HTTPRefusal

logger = logging.getLogger(__name__)

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
    compared, mismatched = counts or (reported.get("compared", 0), reported.get("mismatched", 0))
    return {
        "servers": [server | {"history": server["history"][-each:]} for server in servers],
        "updates": run.updates(),
        "deterministic": {
            "on": counts is not None or parity is not None,
            "compared": compared,
            "mismatched": mismatched,
            "first": reported.get("first"),
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
