"""The ASGI application: routes behind the gate, and one clear answer for every refusal. Each route reads its request, makes one
call on the service, and shapes the answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.routing import BaseRoute

from atroposlib.service.admin_routes import add_fleet_routes, add_status_routes
from atroposlib.service.answers import describe, refuse
from atroposlib.service.environment_routes import add_environment_routes, add_evaluation_routes
from atroposlib.service.group_reader import GroupReader, ReaderError, TooComplexError
from atroposlib.service.records import (
    NotRegisteredError,
    QueueFullError,
    RegistryFullError,
    SupersededError,
    UnknownBatchError,
    UnknownEnvironmentError,
)
from atroposlib.service.reference_routes import add_reference_routes
from atroposlib.service.schemas import InvalidRequestError
from atroposlib.service.service import RolloutService
from atroposlib.service.store import StoreError
from atroposlib.service.trainer_routes import add_trainer_routes
from atroposlib.web.middleware import RequestLimits, RequestLimitsMiddleware

logger = logging.getLogger(__name__)


class ServedPage(Protocol):
    """A page for people beside the service's own routes (atroposlib/dashboard)."""

    @property
    def route(self) -> BaseRoute:
        """Takes the requests for it."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """In the block it is brought up to date."""


def make_app(service: RolloutService, limits: RequestLimits | None = None, page: ServedPage | None = None) -> FastAPI:
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

    app = FastAPI(title="Lockstep rollout service", version="0.1.0", lifespan=lifespan)
    service.require_key(limits.access.api_key is not None)
    app.add_middleware(RequestLimitsMiddleware, limits=limits, answered=service.metrics.answered)
    add_error_handlers(app)
    add_trainer_routes(app, service)
    add_environment_routes(app, service, reader)
    add_evaluation_routes(app, service)
    add_fleet_routes(app, service)
    add_reference_routes(app, service)
    add_status_routes(app, service)
    if page is not None:
        app.router.routes.append(page.route)
    describe(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every refusal of the layers below becomes one clear answer."""

    @app.exception_handler(InvalidRequestError)
    async def _(_: Request, error: InvalidRequestError) -> Response:
        return refuse(422, error.errors)

    @app.exception_handler(QueueFullError)
    async def _(_: Request, error: QueueFullError) -> Response:
        return refuse(429, str(error), {"Retry-After": "1"})

    @app.exception_handler(RegistryFullError)
    async def _(_: Request, error: RegistryFullError) -> Response:
        return refuse(429, str(error), {"Retry-After": "60"})

    @app.exception_handler(StoreError)
    async def _(_: Request, error: StoreError) -> Response:
        return refuse(507, str(error), {"Retry-After": "5"})

    @app.exception_handler(ReaderError)
    async def _(_: Request, error: ReaderError) -> Response:
        logger.error("%s", error)
        return refuse(503, str(error), {"Retry-After": "1"})

    @app.exception_handler(TooComplexError)
    async def _(_: Request, error: TooComplexError) -> Response:
        logger.warning("%s", error)
        return refuse(413, str(error))

    @app.exception_handler(UnknownEnvironmentError)
    @app.exception_handler(UnknownBatchError)
    async def _(_: Request, error: Exception) -> Response:
        return refuse(404, str(error))

    @app.exception_handler(SupersededError)
    @app.exception_handler(NotRegisteredError)
    async def _(_: Request, error: Exception) -> Response:
        return refuse(409, str(error))
