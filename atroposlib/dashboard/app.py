"""The page as an ASGI application, for the rollout service and for `view-run`: its pages, their static
files, the sign-in, and the form of refusals.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from atroposlib.dashboard.page import STATIC, RunPage, page_of
from atroposlib.dashboard.rollouts.archive import ArchiveError, NoSuchError
from atroposlib.dashboard.run_folders.catalogue import UnknownRunError
from atroposlib.dashboard.web.auth import PREFIX, SIGN_IN, PageAuthMiddleware, safe_next
from atroposlib.dashboard.web.data_routes import DATA_ROUTES, number_in_path
from atroposlib.web.middleware import HTTPRefusal

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


async def group(request: Request) -> Response:
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
    Route(f"{PREFIX}/rollouts/{{group}}", group, methods=["GET"]),
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
