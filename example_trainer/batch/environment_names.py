"""Names of environments as keys of figures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)


def safe_name(name: str) -> str:
    """The name with letters, digits, `_`, `.` and `-` alone, which every log, file and dashboard takes; never empty."""
    return _UNSAFE.sub("_", name) or "_"


def safe_names(ids: Iterable[int], names: Mapping[str, Any]) -> dict[int, str]:
    """A safe name for each environment, no two the same.

    Args:
        ids: of the environments, as the rollout service numbers them.
        names: theirs by id, as `/batch` says it; those that are not there are called by their id.

    Example:
        safe_names([3, 4, 5], {"3": "math easy", "4": "math_easy"})  # {3: "math_easy", 4: "math_easy_4", 5: "environment_5"}
    """
    found: dict[int, str] = {}
    for number in sorted(set(ids)):
        said = names.get(str(number))
        name = safe_name(said) if isinstance(said, str) and said else f"environment_{number}"
        while name in found.values():
            name = f"{name}_{number}"
        found[number] = name
    return found
