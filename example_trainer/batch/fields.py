"""Readers of a group's fields, which `atroposlib.wire.ScoredDataGroup` lists, and the writer
of a row. Pure: no I/O, no state.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.wire import (
    GROUP_FIELDS,
    LARGEST_SCORE,
    PROMPT_LOGPROB,
    NullWhereUnknown,
    first_beyond,
)
from example_trainer.batch.group_error import GroupError
from example_trainer.batch.token_fields import TOKEN_FIELDS


def rows(
    group: Mapping[str, Any],
    name: str,
    kind: type[np.int64] | type[np.float32],
    count: int | None = None,
) -> list[npt.NDArray[Any]]:
    """Read numbers for each token of each sequence.

    Args:
        count: sequences of the group; None if this field decides it.

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
            numbers = [np.asarray(row, dtype=kind) for row in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(f"{name} is no list of lists of numbers ({error})") from error
    if any(row.ndim != 1 for row in numbers):
        raise GroupError(f"{name} is no list of lists of numbers")
    if count is not None and len(numbers) != count:
        raise GroupError(f"{name} has {len(numbers)} sequences, tokens has {count}")
    return numbers


def token_rows(
    group: Mapping[str, Any], count: int, unread: Container[str] = ()
) -> dict[str, list[npt.NDArray[Any]]]:
    """Read the fields of TOKEN_FIELDS that a group brings along as one number for each token.

    Args:
        count: sequences of the group.
        unread: names of fields to pass over.

    Returns:
        By the field's name: for each sequence, a number for each of its tokens.

    Raises:
        GroupError: one of them is not numbers for each sequence.
    """
    return {
        name: rows(group, field.wire, field.dtype, count)
        for name, field in TOKEN_FIELDS.items()
        if field.wire and name not in unread and group.get(field.wire)
    }


def at_positions(
    rows_of: Mapping[str, Sequence[npt.NDArray[Any]]],
    i: int,
    length: int,
    positions: npt.NDArray[np.int64],
) -> dict[str, npt.NDArray[Any] | None]:
    """Return the numbers of sequence `i` that `token_rows` read, at its trained tokens.

    Args:
        length: tokens of the sequence.
        positions: [n] which of them are trained.

    Raises:
        GroupError: see at_trained.
    """
    return {name: at_trained(name, rows[i], i, length, positions) for name, rows in rows_of.items()}


def at_trained(
    name: str, row: npt.NDArray[Any], i: int, length: int, positions: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Return the numbers of a sequence's trained tokens, placeholders replaced by the fill value.

    Args:
        name: of the field in TOKEN_FIELDS.
        row: its numbers for sequence `i`.
        length: tokens of the sequence.
        positions: [n] which of them are trained.

    Raises:
        GroupError: the row is not as long as the sequence, or holds what is not a number.
    """
    field = TOKEN_FIELDS[name]
    if len(row) != length:
        raise GroupError(f"{field.wire}[{i}] has {len(row)} entries, tokens[{i}] has {length}")
    trained = row[positions]
    if not np.isfinite(trained).all():
        raise GroupError(f"{field.wire}[{i}] holds NaN or infinity at a trained position")
    if field.largest is None:
        return trained
    return np.where(trained > field.largest, field.dtype(field.fill), trained)


def wire_row(
    length: int, positions: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
) -> list[float]:
    """Return a sequence's row of logprobs for the wire: floats that are these float32 numbers
    exactly, as JSON then writes them.

    Args:
        length: tokens of the sequence.
        positions: [n] which of them have a logprob.
        logprobs: [n] float32.
    """
    row = np.full(length, PROMPT_LOGPROB, dtype=np.float64)
    row[positions] = logprobs
    values: list[float] = row.tolist()
    return values


def per_sequence(group: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Return one entry for each sequence, None where it is unknown.

    Raises:
        GroupError: there are more or fewer.
    """
    values = group.get(name) or [None] * count
    if not isinstance(values, list):
        if isinstance(GROUP_FIELDS[name], NullWhereUnknown):
            return [None] * count
        raise GroupError(f"{name} has no entries, tokens has {count} sequences")
    if len(values) != count:
        raise GroupError(f"{name} has {len(values)} entries, tokens has {count} sequences")
    return values


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


def words(group: Mapping[str, Any], name: str, count: int) -> list[str | None]:
    """Return one word for each sequence, None where there is none.

    Raises:
        GroupError: there are more or fewer.
    """
    values = per_sequence(group, name, count)
    return [None if value is None else str(value) for value in values]


def truths(group: Mapping[str, Any], name: str, count: int) -> list[bool | None]:
    """Return true or false for each sequence, None where there is neither.

    Raises:
        GroupError: there are more or fewer.
    """
    values = per_sequence(group, name, count)
    return [value if isinstance(value, bool) else None for value in values]


def scores(group: Mapping[str, Any], count: int) -> list[float]:
    """The environment's reward of each sequence.

    Raises:
        GroupError: there is not one finite number for each, or one is too large to compute with.
    """
    values = group.get("scores")
    if not isinstance(values, list):
        raise GroupError(f"scores has no entries, tokens has {count} sequences")
    if len(values) != count:
        raise GroupError(f"scores has {len(values)} entries, tokens has {count} sequences")
    if any(
        isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score)
        for score in values
    ):
        raise GroupError(f"scores holds something that is no finite number: {values!s:.200}")
    if (beyond := first_beyond(values, LARGEST_SCORE)) is not None:
        raise GroupError(
            f"scores[{beyond}] is {values[beyond]:g}: its magnitude must be at most {LARGEST_SCORE:g}"
        )
    return [float(score) for score in values]


def own_advantages(
    group: Mapping[str, Any], lengths: Sequence[int]
) -> list[npt.NDArray[np.float32]] | None:
    """The advantages that a group brings along, one for each token of each sequence; None if it
    brings none.

    Raises:
        GroupError: they are neither a number for each sequence nor one for each of its tokens, or
            too large to compute with.
    """
    values = group.get("advantages")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != len(lengths):
        raise GroupError(f"advantages does not have one entry for each of {len(lengths)} sequences")
    advantages = []
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        try:
            with np.errstate(over="ignore"):  # an infinity is refused below
                row = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise GroupError(
                f"advantages[{i}] is neither a number nor a list of numbers"
            ) from error
        if row.shape in ((), (1,)):
            row = np.full(length, row.item(), dtype=np.float32)
        if row.shape != (length,) or not np.isfinite(row).all():
            raise GroupError(
                f"advantages[{i}] is neither a finite number nor {length} of them, one per token"
            )
        if len(row) and (largest := float(np.abs(row).max())) > LARGEST_SCORE:
            raise GroupError(
                f"advantages[{i}] holds {largest:g}: its magnitude must be at most {LARGEST_SCORE:g}"
            )
        advantages.append(row)
    return advantages


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
