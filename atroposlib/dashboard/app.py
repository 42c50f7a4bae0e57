"""The page as an ASGI application: the same in the rollout service and in `view-run`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from atroposlib.dashboard.page import RunPage, page_of
from atroposlib.dashboard.rollouts.routes import rollout_routes
from atroposlib.dashboard.run_folders.catalogue import UnknownRunError
from atroposlib.dashboard.web.auth import PREFIX, PageAuthMiddleware
from atroposlib.dashboard.web.data_routes import DATA_ROUTES
from atroposlib.dashboard.web.page_routes import PAGE_ROUTES
from atroposlib.web.refusal import HTTPRefusal


async def refuse_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the router, such as an unknown address."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    text = (
        "there is nothing at this address"
        if status == 404
        else f"the page cannot do that ({status})"
    )
    answer = page_of(request).refuse(request.scope, status, text)
    answer.headers.update(error.headers or {})
    return answer


async def refuse_unknown_run(request: Request, error: Exception) -> Response:
    """Answer a request for a run that does not exist."""
    return page_of(request).refuse(request.scope, 404, str(error))


async def refuse(request: Request, error: Exception) -> Response:
    """Answer a request that a handler refused."""
    assert isinstance(error, HTTPRefusal)
    return page_of(request).refuse(request.scope, error.status, error.detail)


def make_ui(page: RunPage) -> Starlette:
    """Make the application. All its paths begin with /ui."""
    app = Starlette(
        routes=[*PAGE_ROUTES, *DATA_ROUTES, *rollout_routes(page)],
        middleware=[Middleware(PageAuthMiddleware, auth=page.auth, refuse=page.refuse)],
        exception_handlers={
            HTTPException: refuse_http_error,
            UnknownRunError: refuse_unknown_run,
            HTTPRefusal: refuse,
        },
    )
    app.state.page = page
    app.router.redirect_slashes = False
    return app


def make_offline_app(page: RunPage) -> Starlette:
    """The page by itself, over files."""

    async def to_page(_: Request) -> Response:
        return RedirectResponse(PREFIX)

    return Starlette(
        routes=[Route("/", to_page), PageRoute(page)], lifespan=lambda _: page.running()
    )


class PageRoute(BaseRoute):
    """Hands every request for the page to its application, the address as it is: the page as a part
    of another application.

    A mount would not take /ui itself, and would answer it with a redirection to whatever the Host
    header says.
    """

    path = PREFIX
    """What the service's figures call all of these requests."""

    def __init__(self, page: RunPage) -> None:
        self.page, self.app = page, make_ui(page)

    @property
    def route(self) -> BaseRoute:
        """This, for the application that it is a part of."""
        return self

    def running(self) -> AbstractAsyncContextManager[None]:
        """See RunPage.running."""
        return self.page.running()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether this is a request for the page."""
        path = scope.get("path", "")
        mine = scope["type"] == "http" and (path == PREFIX or path.startswith(f"{PREFIX}/"))
        return (Match.FULL, {"route": self}) if mine else (Match.NONE, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand it on."""
        await self.app(scope, receive, send)
