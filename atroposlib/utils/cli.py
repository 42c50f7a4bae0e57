"""Helpers for programs that build their own command lines on pydantic models with prefixed fields."""

import sys
from copy import copy
from typing import Any

from pydantic import BaseModel, create_model

from atroposlib.utils.keys import all_settings


def get_prefixed_pydantic_model(base_model: type[BaseModel], prefix: str) -> type[BaseModel]:
    """A model with the same fields under prefixed names: `group_size` becomes `env.group_size`."""
    fields: dict[str, Any] = {f"{prefix}{name}": (info.annotation, info) for name, info in base_model.model_fields.items()}
    return create_model(f"{prefix.strip('.').capitalize()}{base_model.__name__}", **fields)


def merge_dicts(*dicts: dict[str, Any]) -> dict[str, Any]:
    """All entries; where a key is in several, the last one's."""
    merged: dict[str, Any] = {}
    for entry in dicts:
        merged.update(entry)
    return merged


def extract_namespace(model: Any, prefix: str) -> dict[str, Any]:
    """The entries of a model or a dict whose names begin with the prefix, without it."""
    entries = all_settings(model) if isinstance(model, BaseModel) else dict(model)
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def adjust_model_defaults(model_class: type[BaseModel], defaults: dict[str, Any] | BaseModel) -> type[BaseModel]:
    """A model whose defaults are replaced by the given ones, where there are any."""
    values = all_settings(defaults) if isinstance(defaults, BaseModel) else defaults
    fields: dict[str, Any] = {}
    for name, info in model_class.model_fields.items():
        if name in values:
            info = copy(info)  # keeps what else is said of the field, such as that it is a key
            info.default, info.default_factory = values[name], None
            fields[name] = (info.annotation, info)
    return create_model(model_class.__name__, __base__=model_class, **fields)


def get_double_dash_flags() -> dict[str, Any]:
    """The program's `--name value`, `--name=value` and bare `--name` (True) arguments; the word None stands for None."""
    flags: dict[str, Any] = {}
    words = sys.argv[1:]
    for position, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        following = words[position + 1] if position + 1 < len(words) else None
        found: Any = value if equals else True
        if not equals and following is not None and not following.startswith("-"):
            found = following
        if name:
            flags[name] = None if found == "None" else found
    return flags
