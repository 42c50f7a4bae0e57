"""Scored groups: the shape in which rollouts travel to the trainer, how one is put together and
when one is refused.

For sequence `i` of a group, `tokens[i]`, `masks[i]`, `inference_logprobs[i]` and, where given,
`advantages[i]` have the same length. `masks[i]` holds the token id where the token is trained and
-100 at prompt positions; `inference_logprobs[i]` holds the logprob under which the token was
sampled and 1.0 at prompt positions. `weight_version_spans[i]` is [[version, tokens], …] over the
tokens that are not -100 in `masks[i]`, in their order, and `weight_epoch_spans[i]` has the epoch of
each span. `sampling_params[i]` says with which parameters they were sampled (see
`inference.sampling`), `finish_reasons[i]` why the sampling ended, and `successes[i]` whether the
item was solved, whatever the score. Each is None where that is not known of a sequence.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from atroposlib.type_definitions import Message
from atroposlib.wire.numbers import (
    LARGEST_FLOAT32,
    LARGEST_SCORE,
    first_beyond,
    plain_numbers,
    plain_score,
    scores_equal,
)

PROMPT_MASK = -100
PROMPT_LOGPROB = 1.0


class ScoredDataGroup(TypedDict, total=False):
    """The responses to one item.

    `tokens`, `masks` and `scores` are required, the rest may be absent or None.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    messages: list[Any] | None
    generation_params: dict[str, Any] | None
    inference_logprobs: list[list[float]] | None
    weight_versions: list[int] | None
    weight_epochs: list[int] | None
    weight_version_spans: list[list[list[int]]] | None
    weight_epoch_spans: list[list[int]] | None
    sampling_params: list[dict[str, float] | list[dict[str, float]] | None] | None
    finish_reasons: list[str | None] | None
    successes: list[bool | None] | None
    group_overrides: dict[str, Any] | None
    overrides: list[dict[str, Any]] | None
    images: Any | None
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None
    env_id: int | None
    idempotency_key: str | None


class ScoredDataItem(TypedDict, total=False):
    """One response. `tokens`, `masks` and `scores` are required, the rest may be absent or None."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    messages: list[Message] | None
    inference_logprobs: list[float] | None
    weight_version: int | None
    weight_epoch: int | None
    weight_version_spans: list[list[int]] | None
    weight_epoch_spans: list[int] | None
    sampling_params: dict[str, float] | list[dict[str, float]] | None
    finish_reason: str | None
    success: bool | None
    group_overrides: dict[str, Any] | None
    overrides: dict[str, Any] | None
    images: Any | None
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None


# The name of a sequence's field in an item, and of the list of them in a group.
PER_SEQUENCE_FIELDS = {
    "tokens": "tokens",
    "masks": "masks",
    "scores": "scores",
    "advantages": "advantages",
    "ref_logprobs": "ref_logprobs",
    "messages": "messages",
    "inference_logprobs": "inference_logprobs",
    "weight_version": "weight_versions",
    "weight_epoch": "weight_epochs",
    "weight_version_spans": "weight_version_spans",
    "weight_epoch_spans": "weight_epoch_spans",
    "sampling_params": "sampling_params",
    "finish_reason": "finish_reasons",
    "success": "successes",
    "overrides": "overrides",
    "images": "images",
    "distill_token_ids": "distill_token_ids",
    "distill_logprobs": "distill_logprobs",
}

SPANS = ("weight_version_spans", "weight_epoch_spans")

NULL_WHERE_UNKNOWN = ("sampling_params", "finish_reason", "success")
"""Fields of an item that are None in the group for items without them: not every server or grader
provides them."""

FREE_UNLESS_LISTED = ("sampling_params", "finish_reasons", "successes")
"""Fields of a group that are the environment's own if they hold no list. The service hands such a
value on unread."""

MAY_BE_EMPTY = (
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "distill_token_ids",
    "distill_logprobs",
)
"""Fields of numbers for each token, where an empty list can only mean that there are none."""


def group_from_items(items: Sequence[Mapping[str, Any]]) -> ScoredDataGroup:
    """Put the responses to one item together.

    An optional field is kept when every response has it; when only some do, the group would not
    line up, so it is refused. Only of how it was sampled something may be missing, which some
    servers tell and some do not: an epoch is 0 then, which stands for one not told, sampling
    parameters and finish reasons are None, and spans are left out.

    Raises:
        ValueError: a required field is missing, or only some of the responses have an optional one.
    """
    group: dict[str, Any] = {}
    for single, plural in PER_SEQUENCE_FIELDS.items():
        values = [
            None if single in MAY_BE_EMPTY and is_empty(item.get(single)) else item.get(single)
            for item in items
        ]
        if (
            single == "finish_reason"
        ):  # environments written for Atropos keep things of their own under this name
            values = [reason if isinstance(reason, str) else None for reason in values]
        if single == "success":  # the name was free for an environment's own values, too
            values = [
                success if isinstance(success, bool) else None
                for success in map(plain_numbers, values)
            ]
        if single == "weight_epoch" and any(values):
            values = [epoch or 0 for epoch in values]
        present = sum(value is not None for value in values)
        if single in SPANS and present < len(items):
            continue
        if single in ("tokens", "masks", "scores") and present < len(items):
            raise ValueError(
                f"{len(items) - present} of {len(items)} trajectories have no {single!r}"
            )
        if 0 < present < len(items) and single not in NULL_WHERE_UNKNOWN:
            raise ValueError(
                f"only {present} of {len(items)} trajectories have {single!r}: give it in all of them or in none"
            )
        if present:
            group[plural] = values
    told = [name for name in SPANS if name in group]
    if told == ["weight_epoch_spans"] or (
        told == ["weight_version_spans"] and "weight_epochs" in group
    ):
        del group[
            told[0]
        ]  # the other half is known of some only, and neither says anything by itself
    overrides: dict[str, Any] = {}
    for item in items:
        overrides.update(item.get("group_overrides") or {})
    group["group_overrides"] = overrides
    return group  # type: ignore[return-value]


def is_empty(value: Any) -> bool:
    """Return True if a field is present and holds nothing, as `[]` or an empty array."""
    return value is not None and hasattr(value, "__len__") and len(value) == 0


def without_empty_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group without the optional fields that are `[]`: environments written for Atropos say
    "none" so.
    """
    return {
        name: value
        for name, value in group.items()
        if name not in MAY_BE_EMPTY or not is_empty(value)
    }


NUMERIC_FIELDS = (
    "tokens",
    "masks",
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "weight_versions",
    "weight_epochs",
    *SPANS,
    "successes",
    "distill_token_ids",
    "distill_logprobs",
)


def with_plain_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with Python's numbers where it has NumPy's, PyTorch's or other packages'
    arrays and scalars.
    """
    plain = dict(group)
    for name in NUMERIC_FIELDS:
        if plain.get(name) is not None:
            plain[name] = plain_numbers(plain[name])
    if plain.get("scores") is not None:
        scores = plain_numbers(plain["scores"])
        plain["scores"] = list(
            map(plain_score, scores if isinstance(scores, list | tuple) else [scores])
        )
    return plain


def wrong_shape(group: Mapping[str, Any], group_size: int) -> str | None:
    """Say what is wrong with a group's structure, or None when it is sound: sizes, lengths, and
    bounds of numbers.
    """
    for field in ("tokens", "masks", "scores"):
        if group.get(field) is None:
            return f"{field!r} is missing"
        if len(group[field]) != group_size:
            return f"{field!r} has {len(group[field])} entries, the group size is {group_size}"
    for index, score in enumerate(group["scores"]):
        if not isinstance(score, float) or not math.isfinite(score):
            return f"scores[{index}] is {score!r}, not a finite number"
        if abs(score) > LARGEST_SCORE:
            return f"scores[{index}] is {score!r}: its magnitude must be at most {LARGEST_SCORE:g}"
    for field in ("masks", "advantages", "ref_logprobs", "inference_logprobs"):
        rows = group.get(field)
        if rows is None:
            continue
        if len(rows) != group_size:
            return f"{field!r} has {len(rows)} entries, the group size is {group_size}"
        for index, (row, tokens) in enumerate(zip(rows, group["tokens"], strict=True)):
            if len(row) != len(tokens) and not (
                field == "advantages" and len(row) == 1
            ):  # one for the whole sequence
                return f"{field}[{index}] has {len(row)} entries for {len(tokens)} tokens"
            bound = LARGEST_SCORE if field == "advantages" else LARGEST_FLOAT32
            if field != "masks" and (at := first_beyond(row, bound)) is not None:
                if not isinstance(row[at], int) and not math.isfinite(row[at]):
                    return f"{field}[{index}] holds a number that is not finite"
                return f"{field}[{index}][{at}] is {row[at]!r:.40}: its magnitude must be at most {bound:g}"
    for index, tokens in enumerate(group["tokens"]):
        if len(tokens) == 0:
            return f"tokens[{index}] is empty"
    for field in ("weight_versions", "weight_epochs", *SPANS, *FREE_UNLESS_LISTED):
        rows = group.get(field)
        if field in FREE_UNLESS_LISTED and not isinstance(rows, list):
            continue
        if rows is not None and len(rows) != group_size:
            return f"{field!r} has {len(rows)} entries, the group size is {group_size}"
    return None


def teaches_nothing(group: Mapping[str, Any]) -> bool:
    """Return True if group-relative advantages are zero: all scores are equal, and the group has no other
    advantages of its own.
    """
    equal = scores_equal(map(plain_score, group["scores"]))
    return equal and not any(value for row in group.get("advantages") or () for value in row)


def response_lengths(group: Mapping[str, Any]) -> list[int]:
    """Trained tokens of each sequence."""
    return [sum(token != PROMPT_MASK for token in mask) for mask in group["masks"]]


class DropCounter:
    """Counts what never reached the trainer, by reason, so that nothing is lost in silence.

    >>> drops = DropCounter()
    >>> drops.add("equal_scores"); drops.add("equal_scores"); drops.add("too_long")
    >>> str(drops), drops.total
    ('equal_scores=2 too_long=1', 3)
    """

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        self.by_reason[reason] += count

    @property
    def total(self) -> int:
        return sum(self.by_reason.values())

    def metrics(self) -> dict[str, float]:
        """`train/dropped_<reason>` -> count since the start of the process."""
        return {
            f"train/dropped_{reason}": float(count)
            for reason, count in sorted(self.by_reason.items())
        }

    def __str__(self) -> str:
        return (
            " ".join(f"{reason}={count}" for reason, count in sorted(self.by_reason.items()))
            or "none"
        )
