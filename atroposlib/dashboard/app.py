"""The page as an ASGI application, for the rollout service and for `view-run`."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from atroposlib.dashboard.page import RunPage, page_of
from atroposlib.dashboard.rollouts.archive import ArchiveError, NoSuchError
from atroposlib.dashboard.run_folders.catalogue import UnknownRunError
from atroposlib.dashboard.web.auth import PREFIX, PageAuthMiddleware
from atroposlib.dashboard.web.data_routes import DATA_ROUTES
from atroposlib.dashboard.web.page_routes import PAGE_ROUTES, to_page
from atroposlib.web.refusal import HTTPRefusal

REFUSALS = {UnknownRunError: 404, NoSuchError: 404, ArchiveError: 503}
"""Error of the layers below -> status of the answer."""


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
    if isinstance(error, HTTPRefusal):
        status = error.status
    else:
        status = next(status for kind, status in REFUSALS.items() if isinstance(error, kind))
    return page_of(request).refuse(request.scope, status, str(error))


def make_ui(page: RunPage) -> Starlette:
    """Make the application. All its paths begin with /ui."""
    app = Starlette(
        routes=[*PAGE_ROUTES, *DATA_ROUTES],
        middleware=[Middleware(PageAuthMiddleware, auth=page.auth, refuse=page.refuse)],
        exception_handlers={
            HTTPException: refuse_http_error,
            HTTPRefusal: refuse,
            **dict.fromkeys(REFUSALS, refuse),
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
