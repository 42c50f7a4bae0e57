"""The wire: what SDK, rollout service and trainer share about groups of rollouts.

`ScoredDataGroup` lists the fields of a group, once for environments, rollout service and trainer.
Its annotations define what a field holds, and the checks on both sides follow from them. A new
field is one line there, and one in `ScoredDataItem` if single responses carry it.

For sequence `i` of a group, the `per_token` fields have one entry for each of `tokens[i]`.
`masks[i]` holds the token id where the token is trained and -100 at prompt positions.
`inference_logprobs[i]` holds the logprob under which the token was sampled and 1.0 at prompt
positions.

The file begins with numbers: their bounds, scores of any number type, and the rule that a boolean is
not a number. It ends with weight versions: which of them count after a trainer restarted.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator
from typing_extensions import TypedDict

from atroposlib.type_definitions import Message

LEAST_INTEGER, LARGEST_INTEGER = -(2**63), 2**64 - 1
"""Integers outside of 64 bits are not exact for every JSON reader, and some readers refuse the
whole document."""
LARGEST_SCORE = 1e9
"""Largest magnitude of a score or an advantage. Sums over a batch of 2**20 sequences and squares of
those sums stay far below the largest float32. So do gradients that are proportional to an
advantage.
"""
LEAST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""Between these magnitudes a number is neither 0 nor infinite in float32."""

SafeInt = Annotated[int, Field(ge=-(2**53) + 1, le=2**53 - 1)]
"""An integer that every JSON reader keeps exactly."""
Version = Annotated[int, Field(ge=0, le=2**53 - 1)]

# The first wrong value ends the reading: a million wrong values would otherwise become a million
# error records.
Ints = Annotated[list[int], Field(fail_fast=True)]
Floats = Annotated[list[FiniteFloat], Field(fail_fast=True)]
IntRows = Annotated[list[Ints], Field(fail_fast=True)]
FloatRows = Annotated[list[Floats], Field(fail_fast=True)]
Versions = Annotated[list[Version], Field(fail_fast=True)]
VersionSpan = Annotated[list[Version], Field(min_length=2, max_length=2)]
VersionSpans = Annotated[list[VersionSpan], Field(fail_fast=True)]


def first_beyond(row: Sequence[float], bound: float) -> int | None:
    """Return the index of the first number that is NaN or whose magnitude exceeds `bound`; None if
    there is none.
    """
    try:
        if (
            math.hypot(*row) <= bound
        ):  # none exceeds the norm; this takes a third of looking at each
            return None
    except OverflowError:  # integers beyond float64
        pass
    return next((index for index, value in enumerate(row) if not -bound <= value <= bound), None)


def path_beyond(values: Sequence[Any], bound: float) -> list[int] | None:
    """Return the indices that lead to the first number that `first_beyond` finds, in lists of any
    depth.

    Raises:
        TypeError: the depth differs, or something is not a number.
    """
    flat = values  # looking at all numbers at once is several times as fast
    while flat and isinstance(flat[0], list | tuple):
        flat = list(chain.from_iterable(flat))
    index = first_beyond(flat, bound)
    if index is None:
        return None
    if flat is values:
        return [index]
    for index, row in enumerate(values):
        if (inner := path_beyond(row, bound)) is not None:
            return [index, *inner]
    return None


def unstorable(value: Any) -> str | None:
    """Return why a JSON document cannot hold `value` for every reader; None if it can.

    Looks at integers and floats alone.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and not LEAST_INTEGER <= value <= LARGEST_INTEGER:
        return f"an integer must lie between {LEAST_INTEGER} and {LARGEST_INTEGER} (64 bits)"
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return "every number must be finite"
    return None


PLAIN = frozenset((int, float, str, type(None)))
"""Types of values that are not booleans and hold none."""


class StrictNumbers(BaseModel):
    """Refuse `true`, `yes` and `on`, NaN and infinity for a number, in files, flags, request bodies
    and Python alike.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        refuse_boolean(cls.model_fields[str(info.field_name)].annotation, value)
        return value


def refuse_boolean(annotation: Any, value: Any) -> None:
    """Refuse `true`, `yes` and `on` where a number is wanted; Python and pydantic take them as 1.

    Args:
        annotation: type of a pydantic field.
        value: what the user gave for it. Lists and tables are checked with their entries.

    Raises:
        ValueError: a boolean stands for a number.
    """
    kinds = _kinds(annotation)
    if isinstance(value, bool):
        if {int, float} & set(kinds) and not {bool, Any, object} & set(kinds):
            raise ValueError(
                "a boolean is not a number (YAML reads yes, no, on and off as booleans); give the number"
            )
        return
    for kind in kinds:
        parts = [part for part in get_args(kind) if part is not Ellipsis]
        if not parts or get_origin(kind) is Literal:
            continue
        if isinstance(value, list | tuple | set):
            if PLAIN.issuperset(map(type, value)):
                continue  # some lists hold a million numbers
            for entry in value:
                refuse_boolean(parts[0], entry)
        elif isinstance(value, dict):
            for entry in value.values():
                refuse_boolean(parts[-1], entry)


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union, without Annotated's metadata."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]


SCORE_TOLERANCE = 1e-6
"""Scores of a group count as equal if they differ by at most this share of the larger of 1 and the
largest magnitude. Sums of float32 rewards differ by a few 1e-7 although they mean the same.
"""


def scores_equal(scores: Iterable[float]) -> bool:
    """Return True if the scores of a group differ by no more than rounding. A group of none or one is
    equal.

    >>> scores_equal([1.0, 1.0000001]), scores_equal([1.0, 1.001]), scores_equal([0.1 + 0.2 - 0.3, 0.0])
    (True, False, True)
    """
    values = [float(score) for score in scores]
    if not values:
        return True
    largest, smallest = max(values), min(values)
    if not math.isfinite(largest - smallest):
        return largest == smallest
    return largest - smallest <= SCORE_TOLERANCE * max(1.0, abs(largest), abs(smallest))


def plain_numbers(value: Any) -> Any:
    """Return numbers, arrays and nested lists of them as Python's own numbers and lists.

    NumPy's, PyTorch's and JAX's scalars and arrays are converted by their `tolist`, so none of
    these packages is imported. Decimal and Fraction become floats, or NaN if float cannot hold
    them. Everything else is returned unchanged.
    """
    if isinstance(value, str | bytes | bool | int) or type(value) is float or value is None:
        return value
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= {int, float}:
            return value
        return [plain_numbers(entry) for entry in value]
    if callable(tolist := getattr(value, "tolist", None)):
        plain = tolist()
        # NumPy returns a longdouble as itself.
        return float(plain) if type(plain) is type(value) else plain_numbers(plain)
    if isinstance(value, Decimal | Fraction | float):
        try:
            return float(value)
        except (OverflowError, ValueError):  # beyond float's range, or a signaling NaN
            return math.nan
    return value


def plain_score(value: Any) -> Any:
    """Return one score as a float if it is a number of any type, or an array with one entry; else
    unchanged.

    >>> plain_score(True), plain_score("1")
    (1.0, '1')
    """
    plain = plain_numbers(value)
    while isinstance(plain, list | tuple) and len(plain) == 1:
        plain = plain[0]
    try:
        return float(plain) if isinstance(plain, int | float) else plain
    except OverflowError:
        return plain  # an integer beyond float's range: the check of the group's shape names it


# ---- sampling parameters that change the distribution that tokens are sampled from ----

NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
}
"""Parameter -> the values at which it changes nothing. `min_tokens` forbids the end of the answer
for so many tokens."""

CONSTRAINED = "constrained"
"""Number of other fields of the request that may change the distribution: a grammar, biases, whatever the
environment's side does not know to be harmless."""


# ---- groups ----

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
    """[n]: of the distribution that the sequence's tokens were sampled from, an object of numbers.
    It has `temperature`; and the non-neutral ones of `top_p`, `top_k`, `min_p`, `presence_penalty`,
    `frequency_penalty`, `repetition_penalty` and `min_tokens`; `constrained` if something else
    changed it. `max_tokens` is of the last request. A sequence whose turns were sampled in
    different ways has a list of such objects instead, in their order. Each has `tokens`, its number
    of sampled tokens.
    """
    finish_reasons: Annotated[Any, NullWhereUnknown()]
    """[n]: why the sampling of the sequence's last turn ended: "stop", "length" or another word of
    the server's."""
    successes: Annotated[Any, NullWhereUnknown()]
    """[n]: true if the sequence solved its item, false if not, whatever its score."""
    routed_experts: Annotated[Any, NullWhereUnknown()]
    """[n]: the experts that a mixture chose for each token but the last, as one word of text; the
    server's /generate answers such words."""
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
    routed_experts: str | None
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
        for name in SPANS:  # some responses have only one of the two, which is useless by itself
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
            return (
                f"scores[{index}] is {score!r}, not a finite number: score every sequence with "
                "one, or raise to have the rollout tried again"
            )
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
        return (
            f"{name!r} has {len(entries)} entries, the group size is {group_size}: make one for "
            "each of group_size sequences, or return None to give the item up"
        )
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


def as_plain(value: Any) -> Any:
    """Environments put numpy scalars, pydantic models and sets into their groups."""
    for method in ("model_dump", "tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")


def encode(value: Any) -> bytes:
    """JSON of a value, as a group is posted.

    Raises:
        TypeError: it holds something that JSON cannot.
    """
    return orjson.dumps(
        value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=as_plain
    )


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


# ---- weight versions ----

# A weight version is a number of optimizer steps, so it can repeat. A trainer that dies at 17 and
# resumes from a checkpoint at 10 makes 11 to 17 a second time. They are other weights. Each trainer
# process has an epoch from the rollout service, above the epochs of the trainers that it continues.
# Each sampled token has the version and the epoch of its weights. Epoch 0 is the checkpoint that
# the first trainer began with.
#
#     session 1   0 ── 5 ── 10 ── 14 ── 17 †     sampled at (1, 5):  still in the lineage, counts as 5
#     session 2              10 ── 11 ── 12      sampled at (1, 14): counts as 9, below all of session 2

MAX_SESSIONS = 256
"""Sessions of a run that count. Rollouts of older ones are judged by these."""


@dataclass(frozen=True, slots=True)
class TrainerSession:
    """One trainer process of a run."""

    epoch: int
    """Above 0."""
    start: int
    """The weight version that it began with."""


def effective_version(epoch: int, version: int, sessions: Sequence[TrainerSession]) -> int:
    """Return the version that these weights count as in the lineage of the present weights.

    Weights that a later session discarded count as one version older than the start of that
    session. A version below 0 is another run's, since a run begins at 0.

    Args:
        epoch: of the session that made the weights.
        version: their optimizer steps.
        sessions: in the order of their epochs.
    """
    for session in sessions:
        if session.epoch > epoch and version > session.start:
            version = session.start - 1
    return version


def oldest(weights: Iterable[tuple[int, int]], sessions: Sequence[TrainerSession]) -> int:
    """Return the lowest `effective_version` among weights given as (epoch, version)."""
    return min(effective_version(epoch, version, sessions) for epoch, version in weights)


def begin_session(
    sessions: Sequence[TrainerSession], epoch: int, start: int
) -> list[TrainerSession]:
    """Return the sessions after a trainer has registered.

    Args:
        sessions: the earlier ones, in the order of their epochs.
        epoch: the trainer's; 0 if it names none, and then no session counts. The epoch of the
            latest session again is that same session, whose start stays as it was.
        start: the weight version that the trainer has.
    """
    if not epoch:
        return []
    before = [session for session in sessions if session.epoch < epoch]
    starts = [session.start for session in sessions if session.epoch == epoch]
    return [*before, TrainerSession(epoch, min([start, *starts]))][-MAX_SESSIONS:]
