"""The ASGI application: routes behind the request limits, and one clear answer for every refusal.

Each route reads its request, makes one call on the service, and returns the answer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.routing import BaseRoute, Match

from atroposlib.service import routes
from atroposlib.service.fleet import FleetFullError, TooManyPublishersError, UnknownServerError
from atroposlib.service.group_reader import GroupReader, ReaderError, TooComplexError
from atroposlib.service.records import (
    NotRegisteredError,
    OlderWorkerError,
    OtherModelError,
    QueueFullError,
    RegistryFullError,
    SupersededError,
    UnknownBatchError,
    UnknownEnvironmentError,
)
from atroposlib.service.schemas import InvalidRequestError
from atroposlib.service.service import RolloutService
from atroposlib.service.store import StoreError
from atroposlib.web.middleware import RequestLimits, RequestLimitsMiddleware

logger = logging.getLogger(__name__)


class ServedPage(Protocol):
    """A page for people beside the service's own routes (atroposlib/dashboard)."""

    @property
    def route(self) -> BaseRoute:
        """Takes the requests for it."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """In the block it is brought up to date."""


def make_app(
    service: RolloutService, limits: RequestLimits | None = None, page: ServedPage | None = None
) -> FastAPI:
    """The ASGI application that serves one rollout service.

    Args:
        page: on which people see the run, at /ui; None for a service without.
    """

    limits = limits or RequestLimits()
    reader = GroupReader(limits.seconds, limits.max_body)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with page.running() if page is not None else nullcontext():
            yield
        reader.close()
        await service.close()

    title = "Lockstep rollout service"
    app = FastAPI(
        title=title,
        version="0.1.0",
        lifespan=lifespan,
        responses=routes.REFUSALS,
        exception_handlers={**dict.fromkeys(REFUSALS, refuse), 405: refuse_method},
    )
    service.require_key(limits.access.api_key is not None)
    app.add_middleware(RequestLimitsMiddleware, limits=limits, answered=service.metrics.answered)
    app.state.service, app.state.reader = service, reader
    app.include_router(routes.router)
    # The router tries one route after the other.
    app.router.routes.sort(key=lambda route: getattr(route, "path", "") not in BUSY_PATHS)
    if page is not None:
        app.router.routes.append(page.route)
    routes.describe(app)
    return app


BUSY_PATHS = ("/scored_data", "/scored_data_list", "/batch", "/batch/ack", "/status-env")
"""Paths that are called once for each group or batch, or more often."""
REFUSALS: dict[type[Exception], tuple[int, dict[str, str]]] = {
    QueueFullError: (429, {"Retry-After": "1"}),
    RegistryFullError: (429, {"Retry-After": "60"}),
    FleetFullError: (429, {"Retry-After": "60"}),
    TooManyPublishersError: (429, {"Retry-After": "60"}),
    StoreError: (507, {"Retry-After": "5"}),
    ReaderError: (503, {"Retry-After": "1"}),
    TooComplexError: (413, {}),
    UnknownEnvironmentError: (404, {}),
    UnknownBatchError: (404, {}),
    UnknownServerError: (404, {}),
    SupersededError: (409, {}),
    NotRegisteredError: (409, {}),
    OtherModelError: (409, {}),
    OlderWorkerError: (409, {}),
    InvalidRequestError: (422, {}),
}
"""Error of the layers below -> status of the answer, and its headers."""


async def refuse_method(request: Request, _: Exception) -> Response:
    """Answer that the path has other methods, and name the methods of all its routes."""
    methods: set[str] = set()
    for route in request.app.router.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return routes.refuse(405, "Method Not Allowed", {"Allow": ", ".join(sorted(methods))})


async def refuse(_: Request, error: Exception) -> Response:
    """Answer a refusal of the layers below with its status and message."""
    status, headers = next(REFUSALS[kind] for kind in type(error).__mro__ if kind in REFUSALS)
    if isinstance(error, InvalidRequestError):
        return routes.refuse(status, error.errors)
    if isinstance(error, ReaderError | TooComplexError):
        logger.error("%s", error)
    return routes.refuse(status, str(error), headers)
