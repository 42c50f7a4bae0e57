"""vLLM's own routes refuse a boolean where a number belongs, and a text where a token id belongs.

pydantic takes `true` for 1 and "5" for 5 in a list of token ids, so that a caller's mistake would be
sampled. Our own routes have strict types.
"""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fastapi import Request
from fastapi.dependencies.utils import get_dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel

ANNOTATIONS: dict[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int, float),
    float: (int, float),
    str: (str,),
}
"""Type of a JSON value -> the annotations that it may stand for."""
REMEDY = "send JSON numbers, without quotation marks, and no true or false"


def refuse_mistaken_numbers(app: Any) -> None:
    """Add the check to each route of vLLM's app that has a body.

    vLLM has built the routes by now, so the check joins their dependencies.
    """
    for route in app.routes:
        if not isinstance(route, APIRoute):
            continue
        for field in route.dependant.body_params:
            model = field.field_info.annotation
            if isinstance(model, type) and issubclass(model, BaseModel):
                check = get_dependant(path=route.path_format, call=_check_of(model))
                route.dependant.dependencies.insert(0, check)


def _check_of(model: type[BaseModel]) -> Any:
    async def check(request: Request) -> None:
        if "json" not in request.headers.get("content-type", "json"):
            return  # the route refuses it
        body = await request.json()
        if not isinstance(body, dict):
            return
        for name, value in body.items():
            field = model.model_fields.get(name)
            if field is not None and not fits(field.annotation, value):
                error = {
                    "type": "value_error",
                    "loc": ("body", name),
                    "msg": f"{name} is {value!r:.80}: {REMEDY}",
                    "input": None,
                }
                raise RequestValidationError([error])

    return check


def fits(annotation: Any, value: Any) -> bool:
    """Return whether a value may stand for a type.

    A boolean may not stand for a number, nor may a list with booleans or texts stand for a list of
    numbers. Other mistakes are pydantic's to find.
    """
    if isinstance(value, bool):
        return _entry_fits(annotation, value)
    if not isinstance(value, list) or not {bool, str, list} & set(map(type, value)):
        return True
    kinds = _kinds(annotation)
    entries = [get_args(kind)[0] for kind in kinds if get_origin(kind) is list and get_args(kind)]
    if not entries:
        return not ANNOTATIONS.keys() & set(kinds)
    return any(all(_entry_fits(entry, one) for one in value) for entry in entries)


def _entry_fits(annotation: Any, value: Any) -> bool:
    if (fitting := ANNOTATIONS.get(type(value))) is None:
        return fits(annotation, value)
    # Any, object, and classes such as an enumeration may take it.
    return any(
        kind in fitting or (kind not in (*ANNOTATIONS, type(None)) and get_origin(kind) is None)
        for kind in _kinds(annotation)
    )


def _kinds(annotation: Any) -> list[Any]:
    """Return the members of a union, without Annotated's metadata."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in _kinds(member)]
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    return [annotation]
