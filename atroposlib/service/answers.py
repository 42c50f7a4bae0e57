"""Parts that all routes use: the service, answers and refusals, integers of the query, and the
OpenAPI description.

The routes read their bodies themselves, so FastAPI cannot describe these.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import TypeAdapter

from atroposlib.service.group_reader import GroupReader
from atroposlib.service.schemas import InvalidRequestError
from atroposlib.service.service import RolloutService

PREFIX = "#/components/schemas/"
MODELS: dict[str, type[Any]] = {}
"""Bodies that routes take, by name: pydantic models and typed dictionaries. `takes` adds them."""
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {"application/json": {"schema": {"type": "object", "required": ["detail"]}}},
    }
    for status, text in {
        400: "The body is no valid gzip",
        401: "No bearer token, or a wrong one",
        403: "Without a key: a web page, or a Host that is not this service's",
        404: "No such environment, batch or inference server",
        408: "The body did not arrive in time",
        409: "No trainer has registered, or another one has taken over, or it has another model",
        413: "The body is too large",
        415: "A Content-Encoding other than gzip",
        422: "The body does not validate; the answer names field, index and value",
        429: "The queue, or the list of servers, is at its bound; see Retry-After",
        503: "Not done in time; see Retry-After",
        507: "The store cannot take more data",
    }.items()
}
"""Answers that refuse a request, for /openapi.json."""


async def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


async def _reader(request: Request) -> GroupReader:
    reader: GroupReader = request.app.state.reader
    return reader


Service = Annotated[RolloutService, Depends(_service)]
"""The service of the application that a route belongs to."""
Reader = Annotated[GroupReader, Depends(_reader)]


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def refuse(status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
    """An answer that refuses the request and says why."""
    return answer({"detail": detail}, status, headers)


def query_int(request: Request, name: str) -> int | None:
    """An integer of the query; None if it is not there.

    Raises:
        InvalidRequestError: it is no integer, or one that not every JSON reader keeps exactly.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if abs(value) >= 2**53:
        error = {
            "type": "int_parsing",
            "loc": ["query", name],
            "msg": f"{name} must be an integer",
            "input": text[:64],
        }
        raise InvalidRequestError([error])
    return value


def takes(model: type[Any], many: bool = False, required: bool = True) -> dict[str, Any]:
    """Return the arguments of a route's decorator that describe its body."""
    MODELS[model.__name__] = model
    schema: dict[str, Any] = {"$ref": PREFIX + model.__name__}
    if many:
        schema = {"type": "array", "items": schema}
    return {
        "openapi_extra": {
            "requestBody": {
                "required": required,
                "content": {"application/json": {"schema": schema}},
            }
        }
    }


def describe(app: FastAPI) -> None:
    """Add the bodies of the routes to /openapi.json."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            bodies = [(name, "validation", TypeAdapter(model)) for name, model in MODELS.items()]
            _, models = TypeAdapter.json_schemas(bodies, ref_template=PREFIX + "{model}")  # type: ignore[arg-type]
            schema.setdefault("components", {}).setdefault("schemas", {}).update(models["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
