"""The rule that a boolean is not a number, for every model of settings."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationInfo, field_validator


class StrictNumbers(BaseModel):
    """Refuse `true`, `yes` and `on` for a number, in files, flags, request bodies and Python alike."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        refuse_boolean(cls.model_fields[str(info.field_name)].annotation, value)
        return value


def refuse_boolean(annotation: Any, value: Any) -> None:
    """Refuse `true`, `yes` and `on` where a number is wanted; Python and pydantic take them as 1.

    Args:
        annotation: type of a pydantic field.
        value: what the user gave for it. Lists and tables are checked with their entries.

    Raises:
        ValueError: a boolean stands for a number.
    """
    kinds = _kinds(annotation)
    if isinstance(value, bool):
        if {int, float} & set(kinds) and not {bool, Any, object} & set(kinds):
            raise ValueError(
                "a boolean is not a number (YAML reads yes, no, on and off as booleans); give the number"
            )
        return
    for kind in kinds:
        parts = [part for part in get_args(kind) if part is not Ellipsis]
        if not parts or get_origin(kind) is Literal:
            continue
        if isinstance(value, list | tuple | set):
            for entry in value:
                refuse_boolean(parts[0], entry)
        elif isinstance(value, dict):
            for entry in value.values():
                refuse_boolean(parts[-1], entry)


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union, without Annotated's metadata."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]
