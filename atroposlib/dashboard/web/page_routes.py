"""The pages, their static files, and the sign-in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from atroposlib.dashboard.page import STATIC, page_of
from atroposlib.dashboard.web.auth import PREFIX, SIGN_IN, safe_next
from atroposlib.dashboard.web.data_routes import number_in_path

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
    is_signed_in = page_of(request).auth.session_ends(request.headers) is not None
    return RedirectResponse(target, 303) if is_signed_in else sign_in_form(request, target)


async def sign_in(request: Request) -> Response:
    """Check the key in the form, and begin a session."""
    sessions, attempts = page_of(request).auth.sessions, page_of(request).auth.attempts
    if sessions is None:
        return RedirectResponse(PREFIX, 303)
    body = await request.body()
    form = parse_qs(body.decode(errors="replace")) if len(body) <= MAX_FORM_BYTES else {}
    target = safe_next(form.get("next", [PREFIX])[0])
    address = request.client.host if request.client else ""
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
    secure = request.scope.get("scheme") == "https"
    answer.set_cookie(
        sessions.cookie,
        sessions.begin(),
        int(sessions.seconds),
        path=PREFIX,
        secure=secure,
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
