"""Names of environments as keys of figures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)


def safe_name(name: str) -> str:
    """The name with letters, digits, `_`, `.` and `-` alone, which every log, file and dashboard
    takes; never empty.
    """
    return _UNSAFE.sub("_", name) or "_"


def safe_names(ids: Iterable[int], names: Mapping[str, Any]) -> dict[int, str]:
    """A safe name for each environment. Those of one name are one environment, in several
    processes; others differ.

    Args:
        ids: of the environments, as the rollout service numbers them.
        names: theirs by id, as `/batch` says it; those that are not there are called by their id.

    Example:
        safe_names([3, 4, 5, 6], {"3": "math easy", "4": "math_easy", "5": "math easy"})
        # {3: "math_easy", 4: "math_easy_2", 5: "math_easy", 6: "environment_6"}
    """
    said = {number: str(names.get(str(number)) or f"environment_{number}") for number in ids}
    safe: dict[str, str] = {}
    for name in sorted(set(said.values())):
        plain, count = safe_name(name), 1
        while (found := plain if count == 1 else f"{plain}_{count}") in safe.values():
            count += 1
        safe[name] = found
    return {number: safe[name] for number, name in said.items()}
