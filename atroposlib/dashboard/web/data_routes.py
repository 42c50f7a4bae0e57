"""GET /ui/api/…: data for the scripts of the page.

The page's own threads read files, never the event loop.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atroposlib.dashboard.events import number
from atroposlib.dashboard.live.hub import EventStream, TooManyPagesError
from atroposlib.dashboard.live.servers import read_versions
from atroposlib.dashboard.live.signs import Known, read_processes, signs_of
from atroposlib.dashboard.page import RunPage, json_answer, page_of
from atroposlib.dashboard.rollouts.archive import ArchiveError
from atroposlib.dashboard.rollouts.archive_reader import (
    ORDERS,
    NoSuchError,
    Position,
    QueryError,
    RolloutSource,
)
from atroposlib.dashboard.rollouts.rollout_stats import told_of_each
from atroposlib.dashboard.rollouts.transcript import described, transcript
from atroposlib.dashboard.run_folders.catalogue import LIVE
from atroposlib.dashboard.run_folders.columns import MAX_POINTS, MIN_POINTS, Series
from atroposlib.dashboard.run_folders.folder import RunFiles, modified, read_object
from atroposlib.dashboard.run_folders.run import Run
from atroposlib.dashboard.web.auth import API
from atroposlib.web.refusal import HTTPRefusal

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


async def run_json(request: Request, read: Callable[[Run], Any]) -> Response:
    """Return what `read` returns for the run in the query."""
    page, run_id = page_of(request), run_id_of(request)
    return await page.answer(request, lambda: read(page.runs.get(run_id)))


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


async def names(request: Request) -> Response:
    """GET /ui/api/names: the figures of a run."""
    return await run_json(request, lambda run: {"names": run.names()})


async def series(request: Request) -> Response:
    """GET /ui/api/series: figures of a run by step, thinned out to a number of points."""
    chosen, points = names_of(request), whole_number(request, "points", 2000)
    if not MIN_POINTS <= points <= MAX_POINTS:
        raise HTTPRefusal(400, f"points={points} is not between {MIN_POINTS} and {MAX_POINTS}")
    first, last = (whole_number(request, name) for name in ("first", "last"))

    def read(run: Run) -> dict[str, Any]:
        return {
            **run.extent(),
            "newest": run.newest(chosen),
            **series_json(run.series(chosen, points, first, last)),
        }

    return await run_json(request, read)


async def table(request: Request) -> Response:
    """GET /ui/api/series.csv: figures of a run as a file."""
    page, chosen, run_id = page_of(request), names_of(request), run_id_of(request)

    def write() -> Response:
        run = page.runs.get(run_id)
        text = csv_of(run.series(chosen or run.names(), MAX_POINTS))
        headers = {"Content-Disposition": f'attachment; filename="{run.files.id}.csv"'}
        return Response(text, headers=headers, media_type="text/csv")

    return await page.in_thread(write)


async def events(request: Request) -> Response:
    """GET /ui/api/events: the events of a run."""

    def read(run: Run) -> dict[str, Any]:
        listed, left_out = run.events()
        return {"events": [event.to_json() for event in listed], "left_out": left_out}

    return await run_json(request, read)


async def evaluations(request: Request) -> Response:
    """GET /ui/api/evaluations: the evaluations of a run."""
    return await run_json(request, lambda run: {"evaluations": run.evaluations()})


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
        servers = newest_history([server.weights() for server in page.live.watch.servers.values()])

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
    try:
        page.hub.require_room()
    except TooManyPagesError as error:
        raise HTTPRefusal(503, str(error)) from error
    return EventStream(page.hub, hello["run"], hello, lambda: page.auth.session_ends(headers))


async def rollouts(request: Request) -> Response:
    """GET /ui/api/rollouts: a page of a list, in an order, of an environment, with a text."""
    return await rollouts_json(request, list_json)


async def group(request: Request) -> Response:
    """GET /ui/api/rollouts/GROUP: the numbers of its rollouts, and the groups before and after it."""
    return await rollouts_json(request, group_json)


async def rollout(request: Request) -> Response:
    """GET /ui/api/rollouts/GROUP/ROLLOUT?begin=&count=: tokens of a rollout; see `transcript`."""
    return await rollouts_json(request, rollout_json)


async def rollouts_json(
    request: Request, read: Callable[[Request, RolloutSource], dict[str, Any]]
) -> Response:
    """Return what `read` returns for the rollouts of the run in the query."""
    page, run_id = page_of(request), run_id_of(request)

    def read_archive() -> dict[str, Any]:
        files = page.runs.files(run_id)
        try:
            content = read(request, page.archives.of(files))
        except OSError as error:
            raise ArchiveError(str(error)) from error
        recorder = page.live.service.recorder if page.live is not None else None
        if recorder is None or files.id != LIVE:
            return content | {"left_out": 0}
        return content | {"left_out": recorder.stats()["left_out"]}

    return await page.answer(request, read_archive, of_rollouts=True)


HANDLERS: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "page": about,
    "runs": runs,
    "best": best,
    "names": names,
    "series": series,
    "series.csv": table,
    "events": events,
    "evaluations": evaluations,
    "stack": stack,
    "weights": weights,
    "stream": stream,
    "rollouts": rollouts,
    "rollouts/{group}": group,
    "rollouts/{group}/{rollout}": rollout,
}
DATA_ROUTES = [
    Route(f"{API}{path}", handler, methods=["GET"]) for path, handler in HANDLERS.items()
]


def kept_stack(files: RunFiles, now: float) -> dict[str, Any]:
    """Return the stack of a run from its service's files, with the present state of its processes.

    Args:
        files: of the run.
        now: Unix seconds.
    """
    stack = read_object(files.observed / "stack.json") if files.observed is not None else {}
    written = number(stack.get("time"))
    if files.observed is None or written is None:
        return {"time": None, "live": False}
    ended = number(read_object(files.observed / "run.json").get("ended"))
    # A time in the future comes from another clock. If the service's clock is behind, the file's
    # own time is more accurate.
    times = [
        at for at in (written, modified(files.observed / "stack.json")) if at <= now + CLOCK_SECONDS
    ]
    try:
        signs = signs_of(
            stack, Known(now, max(times, default=now), ended, read_processes(files.folder))
        )
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or damaged
        signs = {}
    return stack | {"live": False, "signs": signs}


def describe(page: RunPage) -> dict[str, Any]:
    """Return the service or the folder that the page shows."""
    place = page.live.place if page.live is not None else None
    return {
        "live": page.live is not None,
        "run": page.runs.default() or None,
        "name": page.live.files().name if page.live is not None else None,
        "now": time.time(),
        "key": page.auth.sessions is not None,
        "full": page.hub.full or None,
        "service": None if place is None else {"name": place.name, "port": place.port},
        "folder": str(page.runs.roots[0]) if page.runs.roots else None,
    }


def names_of(request: Request) -> list[str]:
    """Return the figures in the query."""
    names = [name for name in request.query_params.get("names", "").split(",") if name]
    if len(names) > MAX_NAMES:
        raise HTTPRefusal(
            400, f"{len(names)} names are more than {MAX_NAMES}: send several requests"
        )
    return list(dict.fromkeys(names))


def whole_number(request: Request, name: str, default: int | None = None) -> Any:
    """Return a whole number in the query."""
    text = request.query_params.get(name)
    if not text:
        return default
    try:
        value = int(text[:20])
    except ValueError:
        raise HTTPRefusal(400, f"{name}={text[:50]!r} is not a whole number") from None
    if abs(value) >= 2**53:
        raise HTTPRefusal(400, f"{name}={value} is too large")
    return value


def series_json(series: Series) -> dict[str, Any]:
    """Return points as the charts take them."""
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
    """Return a table with a row for each point."""
    text = io.StringIO()
    rows = csv.writer(text)
    # A name that a spreadsheet would take for a formula is made text.
    rows.writerow(
        ["step", *(f"'{name}" if name[:1] in "=+-@\t\r" else name for name in series.mean)]
    )
    columns = [column.tolist() for column in series.mean.values()]
    for place, step in enumerate(series.step.tolist()):
        values = [column[place] for column in columns]
        rows.writerow([step, *("" if math.isnan(value) else repr(value) for value in values)])
    return text.getvalue()


def newest_history(servers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the servers with their newest versions, at most MAX_VERSIONS in all: the history of a
    fleet is long.
    """
    each = max(20, MAX_VERSIONS // max(1, len(servers)))
    return [server | {"history": server["history"][-each:]} for server in servers]


def weights_json(
    run: Run, servers: list[dict[str, Any]] | None, parity: dict[str, Any] | None
) -> dict[str, Any]:
    """Return weight versions, updates and token comparisons of a run.

    Args:
        run: to report.
        servers: their present state; None for the state in the run's files.
        parity: from `kept_parity`.
    """
    if servers is None:
        servers = newest_history(past_servers(run))
    return {
        "servers": servers,
        "updates": run.updates(),
        "deterministic": deterministic_json(run, parity or {}),
    }


def deterministic_json(run: Run, parity: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of compared and of different tokens, and the first difference.

    They come from the trainer's rows. If the rows hold none, or are too many to add up, they come
    from the trainer's reports to the service.
    """
    counts = run.counts()
    compared, mismatched = counts or (parity.get("compared", 0), parity.get("mismatched", 0))
    on = counts is not None or bool(parity)
    return {"on": on, "compared": compared, "mismatched": mismatched, "first": parity.get("first")}


def kept_parity(page: RunPage, run: Run) -> dict[str, Any] | None:
    """Return the trainer's report of different tokens; None if there is none, or it cannot be read."""
    try:
        source = page.archives.kept(run.files)
        return None if source is None else source.parity()
    except ArchiveError as error:
        logger.warning("the archive of rollouts cannot be read: %s", error)
        return None


def past_servers(run: Run) -> list[dict[str, Any]]:
    """Return the servers of a run from its files."""
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


def list_json(request: Request, source: RolloutSource) -> dict[str, Any]:
    """Return a page of a list of rollouts."""
    query = request.query_params
    after = query.get("cursor")
    listed = source.listed(
        query.get("sort", ORDERS[0]),
        query.get("environment") or None,
        query.get("text", ""),
        None if after is None else Position.parse(after),
        number_of(query.get("limit", "50"), "limit"),
    )
    return {
        "rollouts": listed.rollouts,
        "next": listed.next and str(listed.next),
        "searched": listed.searched,
        "total": listed.total,
        "environments": source.environments(),
    }


def group_json(request: Request, source: RolloutSource) -> dict[str, Any]:
    """Return the rollouts of a group, each with its numbers and its sampling parameters."""
    kept = source.group(number_in_path(request, "group"))
    older, newer = source.beside(kept.id)
    parameters = told_of_each(kept.content, "sampling_params")
    return {
        "group": kept.id,
        "seq": kept.seq,
        "time": kept.time,
        "environment": kept.environment,
        "rollouts": [
            head | {"sampling": described(parameters[index])}
            for index, head in enumerate(kept.heads)
        ],
        "older": older,
        "newer": newer,
    }


def rollout_json(request: Request, source: RolloutSource) -> dict[str, Any]:
    """Return some tokens of a rollout, with what the trainer computed for them."""
    kept, index = source.group(number_in_path(request, "group")), number_in_path(request, "rollout")
    if index >= len(kept.heads):
        raise NoSuchError(
            f"group {kept.id} has {len(kept.heads)} rollouts, and so no rollout {index}"
        )
    query = request.query_params
    begin = number_of(query.get("begin", "0"), "begin")
    count = min(number_of(query.get("count", "2000"), "count"), MAX_TOKENS)
    trained = source.trained(kept.first + index)
    return transcript(kept.content, index, source.text(), trained, begin, count) | {
        "group": kept.id,
        "rollout": index,
        "trained_version": trained and trained.weight_version,
    }


def number_in_path(request: Request, name: str) -> int:
    """Return the number of a group or a rollout in the address.

    Raises:
        NoSuchError: it is not a whole number, or larger than the archive's numbers can be.
    """
    try:
        return number_of(request.path_params[name], name)
    except QueryError as error:
        raise NoSuchError(
            f"{error}, or has more than 18 digits: no {name} has this number"
        ) from None


def number_of(text: str, name: str) -> int:
    """Return a whole number of the query, 0 or more.

    Raises:
        QueryError: the text is another one.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise QueryError(f"{name} {text[:40]!r} is no whole number from 0 on")
    return int(text)
