"""The pages of rollouts, and the JSON that they ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atroposlib.dashboard.page import RunPage
from atroposlib.dashboard.rollouts.archive import ArchiveError
from atroposlib.dashboard.rollouts.archive_reader import (
    ORDERS,
    KeptGroup,
    NoSuchError,
    Position,
    QueryError,
    RolloutSource,
)
from atroposlib.dashboard.rollouts.rollout_stats import told_of_each
from atroposlib.dashboard.rollouts.transcript import described, transcript
from atroposlib.dashboard.run_folders.catalogue import LIVE, UnknownRunError
from atroposlib.dashboard.web.auth import API, PREFIX

MAX_TOKENS = 10_000
"""Tokens in one answer."""


def rollout_routes(page: RunPage) -> list[Route]:
    """The routes."""

    def route(path: str, answer: Callable[[Request, RolloutSource], dict[str, Any]]) -> Route:
        async def asked(request: Request) -> Response:
            def found() -> dict[str, Any]:
                files = page.runs.files(request.query_params.get("run", ""))
                return answer(request, page.archives.of(files)) | left_out(files.id)

            return await page.answer(request, found, of_rollouts=True)

        return Route(f"{API}{path}", refusing(page, asked), methods=["GET"])

    def left_out(run: str) -> dict[str, Any]:
        recorder = page.live.service.recorder if page.live is not None and run == LIVE else None
        return {"left_out": recorder.stats()["left_out"] if recorder is not None else 0}

    async def lists(request: Request) -> Response:
        return page.render(request.scope, "rollouts.html")

    async def group(request: Request) -> Response:
        return page.render(
            request.scope,
            "rollout.html",
            page_name="rollouts",
            group=number_in_path(request, "group"),
        )

    return [
        Route(f"{PREFIX}/rollouts", lists, methods=["GET"]),
        Route(f"{PREFIX}/rollouts/{{group}}", refusing(page, group), methods=["GET"]),
        route("rollouts", list_json),
        route("rollouts/{group}", group_json),
        route("rollouts/{group}/{rollout}", rollout_json),
    ]


def refusing(
    page: RunPage, answer: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """The same, with a clear answer where it cannot be given."""

    @wraps(answer)
    async def safe(request: Request) -> Response:
        try:
            return await answer(request)
        except (UnknownRunError, NoSuchError) as error:
            return page.refuse(request.scope, 404, str(error))
        except QueryError as error:
            return page.refuse(request.scope, 400, str(error))
        except (ArchiveError, OSError) as error:
            return page.refuse(request.scope, 503, str(error))

    return safe


def list_json(request: Request, source: RolloutSource) -> dict[str, Any]:
    """GET /ui/api/rollouts: a page of a list, in an order, of an environment, with a text."""
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
        "next": None if listed.next is None else str(listed.next),
        "searched": listed.searched,
        "total": listed.total,
        "environments": source.environments(),
    }


def group_json(request: Request, source: RolloutSource) -> dict[str, Any]:
    """GET /ui/api/rollouts/GROUP: the numbers of its rollouts, side by side, and the groups before
    and after it.
    """
    kept = source.group(number_in_path(request, "group"))
    older, newer = source.beside(kept.id)
    return {
        "group": kept.id,
        "seq": kept.seq,
        "time": kept.time,
        "environment": kept.environment,
        "rollouts": [with_sampling(kept, index) for index in range(len(kept.heads))],
        "older": older,
        "newer": newer,
    }


def with_sampling(kept: KeptGroup, index: int) -> dict[str, Any]:
    """A rollout's numbers, and how it was sampled."""
    return kept.heads[index] | {
        "sampling": described(told_of_each(kept.content, "sampling_params")[index])
    }


def rollout_json(request: Request, source: RolloutSource) -> dict[str, Any]:
    """GET /ui/api/rollouts/GROUP/ROLLOUT?begin=&count=: so many tokens of one; see transcript."""
    kept, index = source.group(number_in_path(request, "group")), number_in_path(request, "rollout")
    if index >= len(kept.heads):
        raise NoSuchError(
            f"group {kept.id} has {len(kept.heads)} rollouts, and so no rollout {index}"
        )
    query = request.query_params
    begin, count = (
        number_of(query.get("begin", "0"), "begin"),
        number_of(query.get("count", "2000"), "count"),
    )
    trained = source.trained(kept.first + index)
    shown = transcript(kept.content, index, source.text(), trained, begin, min(count, MAX_TOKENS))
    return shown | {
        "group": kept.id,
        "rollout": index,
        "trained_version": None if trained is None else trained.weight_version,
    }


def number_in_path(request: Request, name: str) -> int:
    """The number of a group or a rollout in the address.

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
    """A whole number of the query, 0 or more.

    Raises:
        QueryError: it is none.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise QueryError(f"{name} {text[:40]!r} is no whole number from 0 on")
    return int(text)
