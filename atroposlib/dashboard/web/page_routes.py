"""The pages themselves, what they are made of, and how one signs in and out."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from atroposlib.dashboard.page import STATIC, RunPage
from atroposlib.dashboard.web.gatekeeper import PREFIX, SIGN_IN, safe_next

MOST_OF_FORM = 8192
"""Bytes."""
TYPES = {
    ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png",
    ".txt": "text/plain; charset=utf-8", ".woff2": "font/woff2", ".ico": "image/x-icon", ".json": "application/json",
}  # fmt: skip
"""What may be served; anything else in the folder is not."""
REVALIDATED = "no-cache"
"""Modules name each other without a version, so each is asked for again; its ETag spares sending it."""


@cache
def static_files() -> dict[str, Path]:
    """What may be served, by its address below /ui/static/: looked up, so that no address leads elsewhere."""
    found = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix in TYPES]
    return {path.relative_to(STATIC).as_posix(): path for path in found}


def page_routes(page: RunPage) -> list[Route]:
    """The routes."""

    def shown(template: str) -> Any:
        async def answer(request: Request) -> Response:
            return page.render(request.scope, template)

        return answer

    async def to_page(request: Request) -> Response:
        return RedirectResponse(PREFIX, 307)

    async def static(request: Request) -> Response:
        path = static_files().get(request.path_params["path"])
        if path is None:
            return page.refuse(request.scope, 404, "there is no such file")
        told = {"Cache-Control": REVALIDATED}
        answer = FileResponse(path, media_type=TYPES[path.suffix], headers=told, stat_result=path.stat())
        tag = answer.headers["etag"]
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=told | {"ETag": tag})
        return answer

    def ask(request: Request, status: int, error: str, following: str, headers: dict[str, str] | None = None) -> Response:
        answer = page.render(request.scope, "sign_in.html", status, error=error, next=following, run="")
        answer.headers.update(headers or {})
        return answer

    async def sign_in(request: Request) -> Response:
        sessions, attempts = page.keeper.sessions, page.keeper.attempts
        if request.method != "POST":
            following = safe_next(request.query_params.get("next", PREFIX))
            signed_in = sessions is None or page.keeper.session_ends(request.headers) is not None
            return RedirectResponse(following, 303) if signed_in else ask(request, 200, "", following)
        if sessions is None:
            return RedirectResponse(PREFIX, 303)
        body = await request.body()
        form = parse_qs(body.decode(errors="replace")) if len(body) <= MOST_OF_FORM else {}
        following = safe_next(form.get("next", [PREFIX])[0])
        address = request.client.host if request.client else ""
        wait = attempts.wait(address)
        if wait > 0:
            again = int(wait) + 1
            text = f"Too many wrong keys were tried. Try again in {again} seconds."
            return ask(request, 429, text, following, {"Retry-After": str(again)})
        if not sessions.is_key(form.get("key", [""])[0].strip()):
            attempts.failed(address)
            text = "That is not the service's key. It is ROLLOUT_API_KEY where the service was started, or in its key file."
            return ask(request, 401, text, following)
        answer = RedirectResponse(following, 303)
        secure = request.scope.get("scheme") == "https"
        answer.set_cookie(
            sessions.cookie, sessions.begin(), int(sessions.seconds), path=PREFIX, secure=secure, httponly=True, samesite="lax"
        )
        return answer

    async def sign_out(request: Request) -> Response:
        answer = RedirectResponse(SIGN_IN, 303)
        if page.keeper.sessions is not None:
            page.keeper.sessions.end(page.keeper.cookie(request.headers))
            page.hub.wake()
            answer.delete_cookie(page.keeper.sessions.cookie, path=PREFIX, httponly=True, samesite="lax")
        return answer

    return [
        Route(PREFIX, shown("overview.html"), methods=["GET"]),
        Route(f"{PREFIX}/", to_page, methods=["GET"]),
        Route(f"{PREFIX}/weights", shown("weights.html"), methods=["GET"]),
        Route(f"{PREFIX}/history", shown("history.html"), methods=["GET"]),
        Route(SIGN_IN, sign_in, methods=["GET", "POST"]),
        Route(f"{PREFIX}/sign-out", sign_out, methods=["POST"]),
        Route(PREFIX + "/static/{path:path}", static, methods=["GET"]),
    ]
