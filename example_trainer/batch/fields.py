"""The fields of a group as the wire has them, checked one by one. Pure: no I/O, no state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.wire.numbers import LARGEST_SCORE, first_beyond
from example_trainer.batch.group_error import GroupError


def rows(
    group: Mapping[str, Any], name: str, kind: type[np.int64] | type[np.float32]
) -> list[npt.NDArray[Any]]:
    """Numbers for each token of each sequence.

    Raises:
        GroupError: there are none, or something else.
    """
    value = group.get(name)
    if not isinstance(value, list) or not value:
        raise GroupError(f"{name} is missing or empty")
    try:
        with np.errstate(
            over="ignore"
        ):  # callers refuse infinities where they matter, with the place
            found = [np.asarray(row, dtype=kind) for row in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(f"{name} is no list of lists of numbers ({error})") from error
    if any(row.ndim != 1 for row in found):
        raise GroupError(f"{name} is no list of lists of numbers")
    return found


def per_sequence(group: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """One entry for each sequence, None where nothing is said.

    Raises:
        GroupError: there are more or fewer.
    """
    values = group.get(name) or [None] * count
    if not isinstance(values, list) or len(values) != count:
        many = len(values) if isinstance(values, list) else "no"
        raise GroupError(f"{name} has {many} entries, tokens has {count} sequences")
    return values


def listed_per_sequence(group: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """As `per_sequence`, of a name that was free once: what is no list is something of an
    environment's own, and says nothing.

    Raises:
        GroupError: there are more or fewer.
    """
    return per_sequence(group, name, count) if isinstance(group.get(name), list) else [None] * count


def optional_ints(group: Mapping[str, Any], name: str, count: int) -> list[int | None]:
    """One number for each sequence, None where there is none.

    Raises:
        GroupError: there are more or fewer, or something else.
    """
    values = per_sequence(group, name, count)
    try:
        return [None if value is None else int(np.int64(int(value))) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(f"{name} holds something that is no number ({error!s:.80})") from error


def scores(group: Mapping[str, Any], count: int) -> list[float]:
    """The environment's reward of each sequence.

    Raises:
        GroupError: there is not one finite number for each, or one is too large to compute with.
    """
    found = group.get("scores")
    if not isinstance(found, list) or len(found) != count:
        raise GroupError(
            f"scores has {len(found) if isinstance(found, list) else 'no'} entries, tokens has {count} sequences"
        )
    if any(
        isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score)
        for score in found
    ):
        raise GroupError(f"scores holds something that is no finite number: {found!s:.200}")
    if (beyond := first_beyond(found, LARGEST_SCORE)) is not None:
        raise GroupError(
            f"scores[{beyond}] is {found[beyond]:g}: its magnitude must be at most {LARGEST_SCORE:g}"
        )
    return [float(score) for score in found]


def own_advantages(
    group: Mapping[str, Any], lengths: Sequence[int]
) -> list[npt.NDArray[np.float32]] | None:
    """The advantages that a group brings along, one for each token of each sequence; None if it
    brings none.

    Raises:
        GroupError: they are neither a number for each sequence nor one for each of its tokens, or
            too large to compute with.
    """
    given = group.get("advantages")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != len(lengths):
        raise GroupError(f"advantages does not have one entry for each of {len(lengths)} sequences")
    found = []
    for i, (value, length) in enumerate(zip(given, lengths, strict=True)):
        try:
            with np.errstate(over="ignore"):  # an infinity is refused below
                row = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise GroupError(
                f"advantages[{i}] is neither a number nor a list of numbers"
            ) from error
        row = np.full(length, row.item(), dtype=np.float32) if row.shape in ((), (1,)) else row
        if row.shape != (length,) or not np.isfinite(row).all():
            raise GroupError(
                f"advantages[{i}] is neither a finite number nor {length} of them, one per token"
            )
        if len(row) and (largest := float(np.abs(row).max())) > LARGEST_SCORE:
            raise GroupError(
                f"advantages[{i}] holds {largest:g}: its magnitude must be at most {LARGEST_SCORE:g}"
            )
        found.append(row)
    return found


def zeroed(group: Mapping[str, Any], count: int, ignored: set[str]) -> list[bool]:
    """Which sequences an override sets to advantage 0. Names of overrides that mean nothing here
    are added to `ignored`.

    Raises:
        GroupError: there is not one object for each sequence, or none for the group.
    """
    overrides = [one or {} for one in per_sequence(group, "overrides", count)]
    whole = group.get("group_overrides") or {}
    for name, one in [
        ("group_overrides", whole),
        *((f"overrides[{i}]", one) for i, one in enumerate(overrides)),
    ]:
        if not isinstance(one, Mapping):
            raise GroupError(f"{name} is no object: {one!r:.80}")
        ignored.update(set(one) - {"set_advantage_to_zero"})
    return [
        bool(whole.get("set_advantage_to_zero") or one.get("set_advantage_to_zero"))
        for one in overrides
    ]
