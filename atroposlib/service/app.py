"""The ASGI application: routes behind the request limits, and one clear answer for every refusal.

Each route reads its request, makes one call on the service, and returns the answer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.routing import BaseRoute

from atroposlib.service import routes
from atroposlib.service.fleet import FleetFullError, TooManyPublishersError, UnknownServerError
from atroposlib.service.group_reader import GroupReader, ReaderError, TooComplexError
from atroposlib.service.records import (
    NotRegisteredError,
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
    app = FastAPI(title=title, version="0.1.0", lifespan=lifespan, responses=routes.REFUSALS)
    service.require_key(limits.access.api_key is not None)
    app.add_middleware(RequestLimitsMiddleware, limits=limits, answered=service.metrics.answered)
    app.state.service, app.state.reader = service, reader
    add_error_handlers(app)
    app.include_router(routes.router)
    if page is not None:
        app.router.routes.append(page.route)
    routes.describe(app)
    return app


REFUSALS: list[tuple[type[Exception], int, str | None]] = [
    (QueueFullError, 429, "1"),
    (RegistryFullError, 429, "60"),
    (FleetFullError, 429, "60"),
    (TooManyPublishersError, 429, "60"),
    (StoreError, 507, "5"),
    (ReaderError, 503, "1"),
    (TooComplexError, 413, None),
    (UnknownEnvironmentError, 404, None),
    (UnknownBatchError, 404, None),
    (UnknownServerError, 404, None),
    (SupersededError, 409, None),
    (NotRegisteredError, 409, None),
    (OtherModelError, 409, None),
]
"""Error of the layers below, status of the answer, and seconds of its Retry-After."""


def add_error_handlers(app: FastAPI) -> None:
    """Answer each refusal of the layers below with its status and message."""

    @app.exception_handler(InvalidRequestError)
    async def _(_: Request, error: InvalidRequestError) -> Response:
        return routes.refuse(422, error.errors)

    def handler(
        status: int, seconds: str | None
    ) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def handle(_: Request, error: Exception) -> Response:
            if isinstance(error, ReaderError | TooComplexError):
                logger.error("%s", error)
            return routes.refuse(status, str(error), {"Retry-After": seconds} if seconds else None)

        return handle

    for kind, status, seconds in REFUSALS:
        app.add_exception_handler(kind, handler(status, seconds))
