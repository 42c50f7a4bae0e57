"""GET /ui/api/…: what the page's scripts ask. Files are read in the page's own threads, never on the event loop."""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atroposlib.dashboard.live.hub import TooManyPagesError
from atroposlib.dashboard.live.servers import read_versions
from atroposlib.dashboard.live.signs import Known, signs_of
from atroposlib.dashboard.page import RunPage, json_answer
from atroposlib.dashboard.rollouts.archive import ArchiveError
from atroposlib.dashboard.run_folders.catalogue import LIVE, UnknownRunError
from atroposlib.dashboard.run_folders.columns import FEWEST_POINTS, MOST_POINTS, Series
from atroposlib.dashboard.run_folders.events import number
from atroposlib.dashboard.run_folders.folder import RunFiles, modified, read_object
from atroposlib.dashboard.run_folders.processes import read_processes
from atroposlib.dashboard.run_folders.run import Run
from atroposlib.dashboard.web.gatekeeper import API
from atroposlib.dashboard.web.stream import EventStream

logger = logging.getLogger(__name__)

MOST_NAMES = 200
"""Figures of one request."""
BEST_SECONDS = 0.5
"""For one answer to read the rewards of all runs, of which the page asks for more until all are read."""
CLOCK_SECONDS = 5.0
"""By which the clocks of two machines may differ without notice."""
MOST_VERSIONS = 10_000
"""Of all servers of a run, that are told at once."""


class BadRequestError(ValueError):
    """The address asks for something that cannot be given; says what, and what could."""


def data_routes(page: RunPage) -> list[Route]:
    """The routes."""

    def route(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        @wraps(answer)
        async def refusing(request: Request) -> Response:
            try:
                return await answer(request)
            except UnknownRunError as error:
                return page.refuse(request.scope, 404, str(error))
            except BadRequestError as error:
                return page.refuse(request.scope, 400, str(error))

        return Route(f"{API}{path}", refusing, methods=["GET"])

    async def of_run(request: Request, ask: Callable[[Run], Any]) -> Response:
        run_id = request.query_params.get("run", "")
        return await page.answer(request, lambda: ask(page.runs.get(run_id)))

    async def about(request: Request) -> Response:
        return json_answer(await page.in_thread(describe, page))

    async def runs(request: Request) -> Response:
        return await page.answer(request, lambda: {"runs": page.runs.summaries(), "current": page.runs.default()})

    async def best(request: Request) -> Response:
        return await page.answer(request, lambda: {"best": page.runs.best_rewards(BEST_SECONDS)})

    async def names(request: Request) -> Response:
        return await of_run(request, lambda run: {"names": run.names()})

    async def series(request: Request) -> Response:
        wanted, points = names_of(request), whole_number(request, "points", 2000)
        if not FEWEST_POINTS <= points <= MOST_POINTS:
            raise BadRequestError(f"points={points} is not between {FEWEST_POINTS} and {MOST_POINTS}")
        first, last = (whole_number(request, name) for name in ("first", "last"))

        def found(run: Run) -> dict[str, Any]:
            rows, last_step = run.extent()
            told = {"run": run.files.id, "generation": run.generation, "rows": rows, "last_step": last_step}
            return told | {"newest": run.newest(wanted)} | series_json(run.series(wanted, points, first, last))

        return await of_run(request, found)

    async def table(request: Request) -> Response:
        wanted, run_id = names_of(request), request.query_params.get("run", "")

        def written() -> Response:
            run = page.runs.get(run_id)
            text = csv_of(run.series(wanted or run.names(), MOST_POINTS))
            told = {"Content-Disposition": f'attachment; filename="{run.files.id}.csv"'}
            return Response(text, headers=told, media_type="text/csv")

        return await page.in_thread(written)

    async def events(request: Request) -> Response:
        def found(run: Run) -> dict[str, Any]:
            listed, left_out = run.events()
            return {"events": [event.to_json() for event in listed], "left_out": left_out}

        return await of_run(request, found)

    async def evaluations(request: Request) -> Response:
        return await of_run(request, lambda run: {"evaluations": run.evaluations()})

    async def stack(request: Request) -> Response:
        run = request.query_params.get("run", "")
        if page.live is not None and run in ("", LIVE):
            return json_answer(page.live.stack or {"live": True, "time": None})

        def kept() -> dict[str, Any]:
            return kept_stack(page.runs.files(run), time.time())

        return await page.answer(request, kept)

    async def weights(request: Request) -> Response:
        run_id = request.query_params.get("run", "")
        servers = None
        if page.live is not None and run_id in ("", LIVE):
            servers = newest_history([server.weights() for server in page.live.watch.servers.values()])

        def found() -> dict[str, Any]:
            run = page.runs.get(run_id)
            return weights_json(run, servers, kept_parity(page, run))

        return await page.answer(request, found, of_rollouts=True)

    async def stream(request: Request) -> Response:
        run_id = request.query_params.get("run", "") or await page.in_thread(page.runs.default)

        def hello() -> dict[str, Any]:
            run = page.runs.get(run_id)
            rows, last_step = run.extent()
            return describe(page) | {"run": run.files.id, "generation": run.generation, "rows": rows, "last_step": last_step}

        told = await page.in_thread(hello)
        headers = request.headers

        def session_ends() -> float | None:
            return math.inf if page.keeper.sessions is None else page.keeper.session_ends(headers)

        try:
            page.hub.require_room()
        except TooManyPagesError as error:
            return page.refuse(request.scope, 503, str(error))
        return EventStream(page.hub, told["run"], told, session_ends)

    return [
        route("page", about),
        route("runs", runs),
        route("best", best),
        route("names", names),
        route("series", series),
        route("series.csv", table),
        route("events", events),
        route("evaluations", evaluations),
        route("stack", stack),
        route("weights", weights),
        route("stream", stream),
    ]


def kept_stack(files: RunFiles, now: float) -> dict[str, Any]:
    """Return the stack of a run as its service wrote it, with the present state of its processes.

    Args:
        files: of the run.
        now: Unix seconds.
    """
    stack = read_object(files.observed / "stack.json") if files.observed is not None else {}
    told = number(stack.get("time"))
    if files.observed is None or told is None:
        return {"time": None, "live": False}
    ended = number(read_object(files.observed / "run.json").get("ended"))
    # A time in the future comes from another clock. If the service's clock is behind, the file's own time is more accurate.
    times = [at for at in (told, modified(files.observed / "stack.json")) if at <= now + CLOCK_SECONDS]
    try:
        signs = signs_of(stack, Known(now, max(times, default=now), ended, read_processes(files.folder)))
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or damaged
        signs = {}
    return stack | {"live": False, "signs": signs}


def describe(page: RunPage) -> dict[str, Any]:
    """What the page is of."""
    place = page.live.place if page.live is not None else None
    return {
        "live": page.live is not None,
        "run": page.runs.default() or None,
        "name": page.live.files().name if page.live is not None else None,
        "now": time.time(),
        "key": page.keeper.sessions is not None,
        "full": page.hub.full or None,
        "service": None if place is None else {"name": place.name, "port": place.port},
        "folder": str(page.runs.roots[0]) if page.runs.roots else None,
    }


def names_of(request: Request) -> list[str]:
    """The figures that are asked for."""
    names = [name for name in request.query_params.get("names", "").split(",") if name]
    if len(names) > MOST_NAMES:
        raise BadRequestError(f"{len(names)} names are more than {MOST_NAMES}: ask for them in several requests")
    return list(dict.fromkeys(names))


def whole_number(request: Request, name: str, default: int | None = None) -> Any:
    """A whole number of the query."""
    text = request.query_params.get(name)
    if not text:
        return default
    try:
        value = int(text[:20])
    except ValueError:
        raise BadRequestError(f"{name}={text[:50]!r} is no whole number") from None
    if abs(value) >= 2**53:
        raise BadRequestError(f"{name}={value} is too large")
    return value


def series_json(series: Series) -> dict[str, Any]:
    """Points as the charts take them."""
    listed = {
        name: {
            "mean": series.mean[name],
            "low": None if series.exact else series.low[name],
            "high": None if series.exact else series.high[name],
        }
        for name in series.mean
    }
    return {"exact": series.exact, "step": series.step, "series": listed}


def csv_of(series: Series) -> str:
    """A table: a row for each point."""
    text = io.StringIO()
    rows = csv.writer(text)
    # A name that a spreadsheet would take for a formula is made text.
    rows.writerow(["step", *(f"'{name}" if name[:1] in "=+-@\t\r" else name for name in series.mean)])
    columns = [column.tolist() for column in series.mean.values()]
    for place, step in enumerate(series.step.tolist()):
        values = [column[place] for column in columns]
        rows.writerow([step, *("" if math.isnan(value) else repr(value) for value in values)])
    return text.getvalue()


def newest_history(servers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Servers with their newest versions, MOST_VERSIONS of all of them: a fleet's history is long."""
    each = max(20, MOST_VERSIONS // max(1, len(servers)))
    return [server | {"history": server["history"][-each:]} for server in servers]


def weights_json(run: Run, servers: list[dict[str, Any]] | None, parity: dict[str, Any] | None) -> dict[str, Any]:
    """GET /ui/api/weights.

    Args:
        servers: as they are now; None to take what was written down of them.
        parity: as `kept_parity` gives it.
    """
    if servers is None:
        servers = newest_history(past_servers(run))
    return {"servers": servers, "updates": run.updates(), "deterministic": deterministic_json(run, parity or {})}


def deterministic_json(run: Run, parity: dict[str, Any]) -> dict[str, Any]:
    """How many tokens were compared and how many differ, from the trainer's rows, or from what it told the service where the
    rows say nothing, or are too many to be added up; and the first that differed."""
    counts = run.counts()
    compared, mismatched = counts or (parity.get("compared", 0), parity.get("mismatched", 0))
    on = counts is not None or bool(parity)
    return {"on": on, "compared": compared, "mismatched": mismatched, "first": parity.get("first")}


def kept_parity(page: RunPage, run: Run) -> dict[str, Any] | None:
    """What the trainer told the service of tokens that differ; None if it told nothing, or that cannot be read."""
    try:
        source = page.archives.kept(run.files)
        return None if source is None else source.parity()
    except ArchiveError as error:
        logger.warning("the archive of rollouts cannot be read: %s", error)
        return None


def past_servers(run: Run) -> list[dict[str, Any]]:
    """The servers of a run as they were written down."""
    if run.files.observed is None:
        return []
    servers = []
    for url, history in read_versions(run.files.observed / "servers.jsonl").items():
        last = history[-1]
        gaps = [(row["gap"], row["time"]) for row in history if row["gap"] is not None]
        gap, at = max(gaps, key=lambda one: one[0], default=(None, None))
        servers.append(
            {
                "url": url, "weight_version": last["version"], "weight_epoch": last["epoch"],
                "checksums": [last["checksum"]] if last["checksum"] else [], "last_update": last["seconds"],
                "longest_gap": gap, "longest_gap_at": at, "history": history, "phase": "", "mode": "", "transfer": "",
                "updates": None, "failures": None, "last_error": "", "quarantine": "", "last_bytes": None,
            }
        )  # fmt: skip
    return servers
