"""Two SDKs' results from the same answers, put into one form and compared. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

OURS_ONLY = frozenset(
    {
        "weight_versions",
        "weight_epochs",
        "weight_version_spans",
        "weight_epoch_spans",
        "sampling_params",
        "finish_reasons",
        "successes",
        "idempotency_key",
        "stream",
        "stream_item",
        "stream_life",
    }
)
"""Fields of a group that the public SDK does not know: they come on top."""
NOT_COMPARED = OURS_ONLY | {"env_id"}
OF_THE_GROUP = frozenset({"group_overrides", "generation_params"})
"""Fields that are not one entry for each sequence."""


def said(group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a posted group that have content: null, an empty list and an empty table have
    none.
    """
    return {
        name: value
        for name, value in group.items()
        if name not in NOT_COMPARED and value not in (None, [], {})
    }


def in_one_order(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with its sequences sorted: environments shuffle them, and requests of one group
    overtake each other.
    """
    told = said(group)
    count = len(told.get("tokens", []))
    rows = [
        name
        for name, value in told.items()
        if name not in OF_THE_GROUP and isinstance(value, list) and len(value) == count
    ]
    sequences = sorted(
        ({name: told[name][i] for name in rows} for i in range(count)), key=canonical
    )
    return {name: value for name, value in told.items() if name not in rows} | {
        "sequences": sequences
    }


def canonical(value: Any) -> str:
    return json.dumps(one_form(value), sort_keys=True, default=str)


def one_form(value: Any) -> Any:
    """The value with whole floats as integers.

    A score of 1 and one of 1.0 are the same number, and an SDK may post either.
    """
    if isinstance(value, dict):
        return {key: one_form(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [one_form(held) for held in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def differences(
    public: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]
) -> list[str]:
    """In words, where the groups of the two differ; their order does not count.

    Empty when they are the same.
    """
    left, right = (
        {canonical(found): found for found in map(in_one_order, side)} for side in (public, ours)
    )
    only_public = [group for key, group in left.items() if key not in right]
    only_ours = [group for key, group in right.items() if key not in left]
    if not only_public and not only_ours:
        return []
    found = [
        f"{len(only_public)} of {len(left)} groups of the public SDK are not among the {len(right)} of ours"
    ]
    for theirs, mine in zip(only_public, only_ours, strict=False):
        found += [
            f"{place}: public {a}, ours {b}" for place, a, b in first_differences(theirs, mine)
        ]
        break
    return found


def first_differences(
    public: Any, ours: Any, place: str = "", limit: int = 6
) -> list[tuple[str, str, str]]:
    """(place, public value, our value) of at most `limit` values that differ, the outermost first."""
    if isinstance(public, dict) and isinstance(ours, dict):
        rows = [
            (f"{place}.{key}".lstrip("."), public.get(key), ours.get(key))
            for key in sorted({*public, *ours})
        ]
    elif isinstance(public, list) and isinstance(ours, list) and len(public) == len(ours):
        rows = [
            (f"{place}[{index}]", a, b)
            for index, (a, b) in enumerate(zip(public, ours, strict=True))
        ]
    else:
        return [] if public == ours else [(place, brief(public), brief(ours))]
    found: list[tuple[str, str, str]] = []
    for where, a, b in rows:
        if a != b and len(found) < limit:
            found += first_differences(a, b, where, limit - len(found))
    return found


def brief(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    length = f" ({len(value)} entries)" if isinstance(value, list) else ""
    return text[:160] + ("…" if len(text) > 160 else "") + length


def asked_differently(
    public: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]
) -> list[str]:
    """In words, which parameters of requests differ, over the prompts that both SDKs sent."""
    first: list[dict[str, Mapping[str, Any]]] = [{}, {}]
    for table, requests in zip(first, (public, ours), strict=True):
        for request in requests:
            table.setdefault(request["prompt"], request)
    shared = first[0].keys() & first[1].keys()
    differing = {
        f"{name}: public {first[0][prompt].get(name)!r}, ours {first[1][prompt].get(name)!r}"
        for prompt in shared
        for name in {*first[0][prompt], *first[1][prompt]}
        if first[0][prompt].get(name) != first[1][prompt].get(name)
    }
    return sorted(differing)
