"""The parts of a stack and their names: service, vllm, vllm-2, vllm-3, …, environment, trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from example_trainer.launcher.errors import LauncherError

PARTS = ("service", "vllm", "environment", "trainer")
"""The kinds of part, in the order in which they are started. There can be several vLLM servers, one
of each of the others."""
SERVERS = "servers"
"""Names every vLLM server where parts are named."""
_SERVER = re.compile(r"vllm(?:-([2-9]|[1-9][0-9]+))?")
_STOP_ORDER = ("environment", "trainer", "vllm", "service")


def server_name(number: int) -> str:
    """`vllm` for the first server (number 0), `vllm-2` for the second one, and so on."""
    return "vllm" if number == 0 else f"vllm-{number + 1}"


def server_number(part: str) -> int | None:
    """Which server a part is, counted from 0; None for another part, or for no part at all."""
    found = _SERVER.fullmatch(part)
    return None if found is None else int(found[1] or 1) - 1


def kind_of(part: str) -> str:
    """The kind, one of PARTS; empty for a name that is no part's."""
    if server_number(part) is not None:
        return "vllm"
    return part if part in PARTS else ""


def parts_of(servers: int) -> tuple[str, ...]:
    """Every part of a stack with so many vLLM servers, in the order in which they are started."""
    names = {"vllm": tuple(server_name(number) for number in range(servers))}
    return tuple(name for kind in PARTS for name in names.get(kind, (kind,)))


def in_order(parts: Iterable[str]) -> tuple[str, ...]:
    """Parts in the order in which they are started, each once."""
    return tuple(
        sorted(set(parts), key=lambda part: (PARTS.index(kind_of(part)), server_number(part) or 0))
    )


def to_stop(parts: Iterable[str]) -> tuple[str, ...]:
    """Parts in the order in which they are stopped: those that feed others first."""
    return tuple(
        sorted(
            set(parts),
            key=lambda part: (_STOP_ORDER.index(kind_of(part)), server_number(part) or 0),
        )
    )


def chosen(named: Sequence[str], there: Sequence[str]) -> tuple[str, ...]:
    """The parts that were named, or all.

    Args:
        named: names as they were typed; `servers` stands for every vLLM server.
        there: the parts that there are.

    Raises:
        LauncherError: a name is no part's, or there is no such server.
    """
    found: set[str] = set()
    for name in named:
        if name == SERVERS:
            found |= {part for part in there if kind_of(part) == "vllm"}
        elif kind_of(name) == "vllm" and name not in there and name != "vllm":
            servers = (
                ", ".join(part for part in there if kind_of(part) == "vllm") or "no vLLM server"
            )
            raise LauncherError(
                f"{name!r} is not there: this stack has {servers}; --vllm-servers says how many"
            )
        elif not kind_of(name):
            known = ", ".join((*PARTS, SERVERS))
            raise LauncherError(
                f"{name!r} is no part of the stack: give some of {known} or vllm-2 and so on, or none for all"
            )
        else:
            found.add(name)
    return in_order(found) if named else in_order(there)
