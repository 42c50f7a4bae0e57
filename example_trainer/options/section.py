"""What all sections of options have in common."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from atroposlib.wire import StrictNumbers


class Section(StrictNumbers):
    """Options that belong together; the docstring of a section is its heading in --help."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True)


def flag_of(field: str) -> str:
    """`batch_size` → `--batch-size`."""
    return "--" + field.replace("_", "-")


def split_commas(value: Any) -> Any:
    """`"a,b"` and `["a,b", "c"]` as lists of names; anything else as it is."""
    parts = value.split(",") if isinstance(value, str) else value
    return (
        [name for part in parts for name in str(part).split(",") if name]
        if isinstance(parts, list)
        else parts
    )
