"""Scored groups: the shape in which rollouts travel to the trainer, how one is put together and
when one is refused.

`ScoredDataGroup` lists the fields of a group, once for environments, rollout service and trainer: its
annotations say what a field holds, and the checks on both sides follow from them. A new field is one
line there, and one in `ScoredDataItem` if single responses carry it.

For sequence `i` of a group, the `per_token` fields have one entry for each of `tokens[i]`.
`masks[i]` holds the token id where the token is trained and -100 at prompt positions;
`inference_logprobs[i]` holds the logprob under which the token was sampled and 1.0 at prompt
positions.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Required, get_args, get_origin

from pydantic import Field
from typing_extensions import TypedDict

from atroposlib.type_definitions import Message
from atroposlib.wire.numbers import (
    LARGEST_FLOAT32,
    LARGEST_SCORE,
    FloatRows,
    Floats,
    IntRows,
    SafeInt,
    Versions,
    VersionSpans,
    path_beyond,
    plain_numbers,
    plain_score,
    scores_equal,
)

PROMPT_MASK = -100
PROMPT_LOGPROB = 1.0
LARGEST_ID = 2**31 - 1
"""Token ids fit into 32 bits."""

Key = Annotated[str, Field(min_length=1, max_length=256)]


@dataclass(frozen=True)
class PerSequence:
    """Mark a field of a group that has one entry for each sequence."""


@dataclass(frozen=True)
class Numbers(PerSequence):
    """Mark a field that holds numbers, in lists of any depth.

    Attributes:
        per_token: each entry has one entry for each token of its sequence.
        one_for_all: a row of one number stands for all tokens of its sequence.
        largest: magnitude of its numbers; None if they have a check of their own.
    """

    per_token: bool = False
    one_for_all: bool = False
    largest: float | None = None


@dataclass(frozen=True)
class NullWhereUnknown(PerSequence):
    """Mark a field whose entry is None if it is unknown: not every server or grader provides it.

    A value that is not a list is the environment's own, since the name was free once. The service
    hands it on unread.
    """


class ScoredDataGroup(TypedDict, total=False):
    """The responses to one item: n sequences that answer the same prompt.

    `tokens`, `masks` and `scores` are required, the rest may be absent or None.
    """

    tokens: Required[Annotated[IntRows, Numbers()]]
    """Token ids [n][length]."""
    masks: Required[Annotated[IntRows, Numbers(per_token=True)]]
    """[n][length]: the token id where it is trained on, -100 elsewhere. At least one token is
    trained on, other than a first one."""
    scores: Required[Annotated[Floats, Numbers(largest=LARGEST_SCORE)]]
    """[n]"""
    advantages: Annotated[
        FloatRows | None, Numbers(per_token=True, one_for_all=True, largest=LARGEST_SCORE)
    ]
    """[n][length], or [n][1] for the whole sequence."""
    ref_logprobs: Annotated[FloatRows | None, Numbers(per_token=True, largest=LARGEST_FLOAT32)]
    """[n][length]"""
    messages: list[Any] | None
    generation_params: dict[str, Any] | None
    inference_logprobs: Annotated[
        FloatRows | None, Numbers(per_token=True, largest=LARGEST_FLOAT32)
    ]
    """[n][length]: 1.0 at prompt positions, elsewhere the sampled token's logprob."""
    overrides: Annotated[list[dict[str, Any]] | None, PerSequence()]
    group_overrides: dict[str, Any] | None
    images: Any | None
    env_id: SafeInt | None
    distill_token_ids: Annotated[
        Annotated[list[IntRows], Field(fail_fast=True)] | None,
        Numbers(per_token=True, largest=LARGEST_ID),
    ]
    """[n][length][k]"""
    distill_logprobs: Annotated[
        Annotated[list[FloatRows], Field(fail_fast=True)] | None,
        Numbers(per_token=True, largest=LARGEST_FLOAT32),
    ]
    """[n][length][k]"""
    weight_versions: Annotated[Versions | None, Numbers()]
    """[n]: the version of the oldest weights that any token of the sequence was sampled under."""
    weight_epochs: Annotated[Versions | None, Numbers()]
    """[n]: the epoch of those weights, which names the trainer process that made them; 0 before any
    trainer."""
    weight_version_spans: Annotated[
        Annotated[list[VersionSpans], Field(fail_fast=True)] | None, Numbers()
    ]
    """[n][spans][2]: a version and the number of tokens sampled under it, over the tokens that are
    not -100 in `masks`, in their order."""
    weight_epoch_spans: Annotated[
        Annotated[list[Versions], Field(fail_fast=True)] | None, Numbers()
    ]
    """[n][spans]: the epoch of the weights of each span."""
    sampling_params: Annotated[Any, NullWhereUnknown()]
    """[n]: of the distribution that the sequence's tokens were sampled from, an object of numbers:
    `temperature`, and what was not neutral of `top_p`, `top_k`, `min_p`, `presence_penalty`,
    `frequency_penalty`, `repetition_penalty` and `min_tokens`; `constrained` if something else
    changed it; and `max_tokens` of the last request. A sequence whose turns were sampled in
    different ways has a list of such objects instead, each with `tokens`, its number of sampled
    tokens, in their order."""
    finish_reasons: Annotated[Any, NullWhereUnknown()]
    """[n]: why the sampling of the sequence's last turn ended: "stop", "length" or another word of
    the server's."""
    successes: Annotated[Any, NullWhereUnknown()]
    """[n]: true if the sequence solved its item, false if not, whatever its score."""
    idempotency_key: Key | None
    """Chosen by the client. A repeated key gets the same answer, and the group counts once."""


def _marker(annotation: Any) -> PerSequence | None:
    if get_origin(annotation) is Required:
        return _marker(get_args(annotation)[0])
    markers = getattr(annotation, "__metadata__", ())
    return next((marker for marker in markers if isinstance(marker, PerSequence)), None)


GROUP_FIELDS = {
    name: _marker(annotation) for name, annotation in ScoredDataGroup.__annotations__.items()
}
"""Marker of each field; None for a field of the whole group."""
PER_SEQUENCE = {name: marker for name, marker in GROUP_FIELDS.items() if marker is not None}
NUMBERS = {name: marker for name, marker in PER_SEQUENCE.items() if isinstance(marker, Numbers)}
PER_TOKEN = {name: marker for name, marker in NUMBERS.items() if marker.per_token}
REQUIRED = ("tokens", "masks", "scores")
SPANS = ("weight_version_spans", "weight_epoch_spans")


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


PLURALS = {
    "weight_version": "weight_versions",
    "weight_epoch": "weight_epochs",
    "finish_reason": "finish_reasons",
    "success": "successes",
}
"""Name of a response's field -> name of the list of them in a group, where the two differ."""


def group_from_items(items: Sequence[Mapping[str, Any]]) -> ScoredDataGroup:
    """Put the responses to one item together.

    An optional field is kept when every response has it; when only some do, the group would not
    line up, so it is refused. Only facts about the sampling may be missing, since not every server
    provides them. An unknown epoch is 0 then, unknown sampling parameters and finish reasons are
    None, and spans are left out.

    Raises:
        ValueError: a required field is missing, or only some of the responses have an optional one.
    """
    items = [without_empty_fields(item) for item in items]
    group: dict[str, Any] = {}
    for single in ScoredDataItem.__annotations__:
        name = PLURALS.get(single, single)
        values = [item.get(single) for item in items]
        if name == "finish_reasons":  # environments written for Atropos use the name otherwise
            values = [reason if isinstance(reason, str) else None for reason in values]
        if name == "successes":  # the name was free for an environment's own values, too
            values = [
                success if isinstance(success, bool) else None
                for success in map(plain_numbers, values)
            ]
        if name == "weight_epochs" and any(values):
            values = [epoch or 0 for epoch in values]
        present = sum(value is not None for value in values)
        if name == "group_overrides" or (name in SPANS and present < len(items)):
            continue
        if name in REQUIRED and present < len(items):
            raise ValueError(
                f"{len(items) - present} of {len(items)} trajectories have no {single!r}"
            )
        nullable = isinstance(GROUP_FIELDS[name], NullWhereUnknown)
        if 0 < present < len(items) and not nullable:
            raise ValueError(
                f"only {present} of {len(items)} trajectories have {single!r}: "
                "give it in all of them or in none"
            )
        if present:
            group[name] = values
    versions_only = "weight_version_spans" in group and "weight_epoch_spans" not in group
    if "weight_version_spans" not in group or (versions_only and "weight_epochs" in group):
        for name in SPANS:  # some responses have only one of the two, which says nothing by itself
            group.pop(name, None)
    group["group_overrides"] = {}
    for item in items:
        group["group_overrides"].update(item.get("group_overrides") or {})
    return group  # type: ignore[return-value]


def without_empty_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group, or an item, without its optional per-token fields that are `[]` or an empty
    array.

    Environments written for Atropos send `[]` for None.
    """
    return {
        name: value
        for name, value in group.items()
        if name in REQUIRED
        or name not in PER_TOKEN
        or not (hasattr(value, "__len__") and len(value) == 0)
    }


def with_plain_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with Python's numbers where it has NumPy's, PyTorch's or other packages'
    arrays and scalars.
    """
    plain = dict(group)
    for name in PER_SEQUENCE:
        if plain.get(name) is not None:
            plain[name] = plain_numbers(plain[name])
    scores = plain.get("scores")
    if scores is not None:
        scores = scores if isinstance(scores, list | tuple) else [scores]
        plain["scores"] = list(map(plain_score, scores))
    return plain


def wrong_shape(group: Mapping[str, Any], group_size: int) -> str | None:
    """Describe the first error of a group's structure: sizes, lengths, and bounds of numbers.

    Return None if there is none.
    """
    for name in REQUIRED:
        if group.get(name) is None:
            return f"{name!r} is missing"
    for name, marker in PER_SEQUENCE.items():
        if wrong := _wrong_size(name, marker, group.get(name), group_size):
            return wrong
    for index, (tokens, score) in enumerate(zip(group["tokens"], group["scores"], strict=True)):
        if not isinstance(score, float) or not math.isfinite(score):
            return f"scores[{index}] is {score!r}, not a finite number"
        if len(tokens) == 0:
            return f"tokens[{index}] is empty"
    for name, marker in NUMBERS.items():
        try:
            wrong = _wrong_numbers(name, marker, group)
        except TypeError:
            return f"{name!r} holds something else than lists of numbers"
        if wrong:
            return wrong
    return None


def _wrong_size(name: str, marker: PerSequence, entries: Any, group_size: int) -> str | None:
    if entries is None:
        return None
    if not isinstance(entries, list | tuple):
        if isinstance(marker, NullWhereUnknown):
            return None
        return f"{name!r} is not a list with an entry for each sequence"
    if len(entries) != group_size:
        return f"{name!r} has {len(entries)} entries, the group size is {group_size}"
    return None


def _wrong_numbers(name: str, marker: Numbers, group: Mapping[str, Any]) -> str | None:
    values: Any = group.get(name)
    if values is None:
        return None
    if marker.per_token:
        for index, (row, tokens) in enumerate(zip(values, group["tokens"], strict=True)):
            if len(row) != len(tokens) and not (marker.one_for_all and len(row) == 1):
                return f"{name}[{index}] has {len(row)} entries for {len(tokens)} tokens"
    path = path_beyond(values, marker.largest) if marker.largest else None
    if path is None:
        return None
    for index in path:
        values = values[index]
    if not isinstance(values, int) and not math.isfinite(values):
        return f"{name}[{path[0]}] holds a number that is not finite"
    place = "".join(f"[{index}]" for index in path)
    return f"{name}{place} is {values!r:.40}: its magnitude must be at most {marker.largest:g}"


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
