"""A posted group: its model, the checks beyond the types of its fields, and how it becomes a
validated group.

A group is a body of many thousand numbers, so it is read once, by pydantic's own JSON parser, and
the bytes that came in are the bytes that go out: `read_groups` never builds them anew unless a
value had to be converted.
"""

from __future__ import annotations

import logging
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from atroposlib.service.records import ValidatedGroup
from atroposlib.service.schemas import (
    FloatRows,
    Floats,
    IntRows,
    InvalidRequestError,
    Key,
    SafeInt,
    Versions,
    VersionSpans,
    invalid,
    path,
    refused,
    short,
)
from atroposlib.wire.numbers import (
    LARGEST_FLOAT32,
    LARGEST_SCORE,
    LEAST_FLOAT32,
    first_beyond,
    unstorable,
)
from atroposlib.wire.sampling_parameters import CONSTRAINED, NEUTRAL

logger = logging.getLogger(__name__)

LARGEST_ID = 2**31 - 1
"""Token ids fit into 32 bits."""
SIGN_BYTE = 3 if sys.byteorder == "little" else 0
"""Of the four of a 32-bit integer."""
WITHOUT_SIGN = bytes(range(128))
NOT_TRAINED = -100
"""In masks: nothing is learned from this token."""
DEEPEST = 100
"""Levels of lists and objects within a field of free form. The JSON readers of clients stop between
200 and 1,024."""
MAX_FINISH_REASON = 64
"""Characters of a finish reason."""
PARAMETERS = ("temperature", *NEUTRAL, CONSTRAINED, "max_tokens", "tokens")
"""What is read of an entry of sampling_params."""


class ScoredData(BaseModel):
    """POST /scored_data: one group, n sequences that answer the same prompt."""

    model_config = ConfigDict(extra="allow")

    tokens: IntRows
    """Token ids [n][length]."""
    masks: IntRows
    """[n][length]: the token id where it is trained on, -100 elsewhere. At least one token is,
    other than a first one."""
    scores: Floats
    """[n]"""
    advantages: FloatRows | None = None
    """[n][length], or [n][1] for the whole sequence."""
    ref_logprobs: FloatRows | None = None
    """[n][length]"""
    messages: list[Any] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: FloatRows | None = None
    """[n][length]: 1.0 at prompt positions, elsewhere the sampled token's logprob."""
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: SafeInt | None = None
    distill_token_ids: Annotated[list[IntRows], Field(fail_fast=True)] | None = None
    """[n][length][k]"""
    distill_logprobs: Annotated[list[FloatRows], Field(fail_fast=True)] | None = None
    """[n][length][k]"""
    weight_versions: Versions | None = None
    """[n]: the version of the oldest weights that any token of the sequence was sampled under."""
    weight_epochs: Versions | None = None
    """[n]: the epoch of those weights, which names the life of the trainer that made them; 0 before
    any trainer."""
    weight_version_spans: Annotated[list[VersionSpans], Field(fail_fast=True)] | None = None
    """[n][spans][2]: a version and the number of tokens sampled under it, in the order of the
    sequence's sampled tokens."""
    weight_epoch_spans: Annotated[list[Versions], Field(fail_fast=True)] | None = None
    """[n][spans]: the epoch of the weights of each span."""
    sampling_params: Any | None = None
    """[n]: of the distribution that the sequence's tokens were sampled from, an object of numbers:
    `temperature`, and what was not neutral of `top_p`, `top_k`, `min_p`, `presence_penalty`,
    `frequency_penalty`, `repetition_penalty` and `min_tokens`; `constrained` if something else
    changed it; and `max_tokens` of the last request. A sequence whose turns were sampled in
    different ways has a list of such objects instead, each with `tokens`, the number of sampled
    tokens that it is of, in their order. Null where it is not known. What is no list is a client's
    own, and is handed on as it is."""
    finish_reasons: Any | None = None
    """[n]: why the sampling of the sequence ended: "stop", "length" or another word of the
    server's. Of its last turn; null where it is not known. What is no list is a client's own, and
    is handed on as it is."""
    successes: Any | None = None
    """[n]: true if the sequence solved its item, false if not, null where that is not known. A
    value that is not a list is a client's own, and is handed on unread."""
    idempotency_key: Key | None = None
    """Chosen by the client; the same key again is answered again but not counted again."""


RETURNED = [name for name in ScoredData.model_fields if name != "idempotency_key"]
"""The keys that every group in a batch has, null where nothing was posted."""

REFERENCE_KEY = b',"ref_logprobs":'
"""The last key in the body of a group that came without: so that they can be put there."""
NO_REFERENCE = REFERENCE_KEY + b"null}"

PER_SEQUENCE = (
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "distill_token_ids",
    "distill_logprobs",
    "overrides",
    "weight_versions",
    "weight_epochs",
    "weight_version_spans",
    "weight_epoch_spans",
    "sampling_params",
    "finish_reasons",
    "successes",
)
"""Optional fields with one entry for each sequence."""
PER_TOKEN = (
    "masks",
    "inference_logprobs",
    "ref_logprobs",
    "advantages",
    "distill_token_ids",
    "distill_logprobs",
)
"""Fields with one entry for each token of each sequence."""
FREE = (
    "messages",
    "generation_params",
    "overrides",
    "group_overrides",
    "images",
    "sampling_params",
    "finish_reasons",
    "successes",
)
"""Fields whose values have no fixed form."""

_one = TypeAdapter(ScoredData)
_many = TypeAdapter(list[ScoredData])


def read_groups(body: bytes, many: bool) -> list[ValidatedGroup]:
    """Read one posted group, or a list of them, and check all that can be checked without the
    queue.

    Raises:
        InvalidRequestError: says which field, at which index, with which value, is wrong.
    """
    adapter: TypeAdapter[Any] = _many if many else _one
    exact = True
    try:
        parsed = adapter.validate_json(body, strict=True)
    except ValidationError:
        try:  # "7" and 7.0 are taken for 7, as they always were on this wire
            parsed, exact = adapter.validate_json(body), False
        except ValidationError as error:
            raise refused(error) from None
    if not many:
        exact = not _clear_empty(parsed) and not _says_that_none_are_referenced(parsed) and exact
        check_group(parsed, [])
        body = body.strip() if exact else _dump(parsed)
        # Two JSON readers differ: this one drops the first of two equal keys unread, the trainer's
        # reads both.
        if reason := unreadable(body):
            raise invalid(
                [],
                None,
                f"the body cannot be read by trainers: {reason}; look for a key that is given twice",
            )
        return [_validated(parsed, body)]
    for index, group in enumerate(parsed):
        _clear_empty(group)
        check_group(group, [index])
    return [_validated(group, _dump(group)) for group in parsed]


def _clear_empty(group: ScoredData) -> bool:
    """Stock clients send an empty list where they have nothing for any sequence.

    Returns whether there was one.
    """
    empty = [name for name in PER_SEQUENCE if getattr(group, name) == [] and group.tokens]
    for name in empty:
        setattr(group, name, None)
    return bool(empty)


def _says_that_none_are_referenced(group: ScoredData) -> bool:
    """The key may stand anywhere in the body, where no reference could be put later."""
    return group.ref_logprobs is None and "ref_logprobs" in group.model_fields_set


def _dump(group: ScoredData) -> bytes:
    absent = {"ref_logprobs"} if group.ref_logprobs is None else None
    return group.model_dump_json(exclude_unset=True, exclude=absent).encode()


def _validated(group: ScoredData, body: bytes) -> ValidatedGroup:
    missing = [
        name for name in RETURNED if name not in group.model_fields_set and name != "ref_logprobs"
    ]
    referenced = group.ref_logprobs is not None
    if missing or not referenced:
        ends = b"}" if referenced else NO_REFERENCE
        body = body[:-1] + "".join(f',"{name}":null' for name in missing).encode() + ends
    lengths = [len(row) for row in group.tokens]
    versions = group.weight_versions or []
    return ValidatedGroup(
        body=body,
        size=len(lengths),
        longest=max(lengths),
        env_id=group.env_id,
        weights=tuple(sorted(set(zip(group.weight_epochs, versions, strict=True))))
        if group.weight_epochs
        else tuple((None, version) for version in sorted(set(versions))),
        key=group.idempotency_key,
        tokens=sum(lengths),
        referenced=referenced,
        **place_in_stream(group.model_extra or {}),
    )


def with_reference(body: bytes, ref_logprobs: bytes = b"null") -> bytes:
    """The body of a group with this reference, in place of the one that it had.

    Args:
        body: of a group that came without ref_logprobs, so that they are the last of its keys.
        ref_logprobs: [n][length], as JSON.
    """
    return body[: body.rindex(REFERENCE_KEY)] + REFERENCE_KEY + ref_logprobs + b"}"


def place_in_stream(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the item that a posted group answers, as fields of a `ValidatedGroup`.

    The result is empty if the group names no item, or if its client uses these names for something
    else.
    """
    stream, item, life = extra.get("stream"), extra.get("stream_item"), extra.get("stream_life")
    if (
        isinstance(stream, str)
        and type(item) is int
        and 0 <= item < 2**53
        and isinstance(life, str)
    ):
        return {"stream": stream, "item": item, "life": life}
    return {}


def check_group(group: ScoredData, at: list[str | int]) -> None:
    """Check the lengths that must agree, and the numbers that must fit.

    Raises:
        InvalidRequestError: names the field, the index and the value.
    """
    if not group.tokens:
        raise invalid(
            [*at, "tokens"],
            [],
            f"{path([*at, 'tokens'])} is []: a group needs at least one sequence",
        )
    lengths = [len(row) for row in group.tokens]
    if 0 in lengths:
        where = [*at, "tokens", lengths.index(0)]
        raise invalid(where, [], f"{path(where)} is []: a sequence needs at least one token")
    if group.weight_epochs and not group.weight_versions:
        where = [*at, "weight_epochs"]
        raise invalid(
            where, len(group.weight_epochs), f"{path(where)} says nothing without weight_versions"
        )
    _check_lengths(group, lengths, at)
    _check_spans(group, lengths, at)
    _check_numbers(group, at)
    _check_entries(group, lengths, at)
    for name, value in [
        *((name, getattr(group, name)) for name in FREE),
        *(group.model_extra or {}).items(),
    ]:
        check_free(value, [*at, name])
    _check_ids(group, at)


def _check_lengths(group: ScoredData, lengths: list[int], at: list[str | int]) -> None:
    """Check that fields have one entry for each sequence, and those of PER_TOKEN one row entry for
    each token.
    """
    for name in ("masks", "scores", *PER_SEQUENCE):
        values = listed(group, name)
        if values is not None and len(values) != len(lengths):
            where = [*at, name]
            message = (
                f"{path(where)} has {len(values)} entries for {len(lengths)} sequences in tokens"
            )
            raise invalid(where, len(values), message)
    for name in PER_TOKEN:
        for index, row in enumerate(getattr(group, name) or []):
            if len(row) != lengths[index] and not (name == "advantages" and len(row) == 1):
                where = [*at, name, index]
                message = f"{path(where)} has {len(row)} entries for the {lengths[index]} tokens of that sequence"
                raise invalid(where, len(row), message)


def _check_entries(group: ScoredData, lengths: list[int], at: list[str | int]) -> None:
    """Check the entries that describe one sequence each."""
    for index, entry in enumerate(listed(group, "sampling_params") or []):
        check_sampling(entry, lengths[index], [*at, "sampling_params", index])
    for index, reason in enumerate(listed(group, "finish_reasons") or []):
        check_finish_reason(reason, [*at, "finish_reasons", index])
    for index, success in enumerate(listed(group, "successes") or []):
        check_success(success, [*at, "successes", index])
    for index, messages in enumerate(group.messages or []):
        _check_messages(messages, [*at, "messages", index])


def _check_ids(group: ScoredData, at: list[str | int]) -> None:
    """Check the token ids of tokens and masks, and that at least one token is trained on."""
    for index, row in enumerate(group.tokens):
        if _negatives(row) != 0:
            raise _wrong_id(row, [*at, "tokens", index], f"a token id is from 0 to {LARGEST_ID}")
    trainable = False
    for index, row in enumerate(group.masks):
        negatives = _negatives(row)
        if negatives and row.count(NOT_TRAINED) != negatives:
            rule = f"a mask holds {NOT_TRAINED} where nothing is trained on, and a token id from 0 to {LARGEST_ID} elsewhere"
            raise _wrong_id(row, [*at, "masks", index], rule, NOT_TRAINED)
        trainable = trainable or len(row) - negatives > (
            row[0] != NOT_TRAINED
        )  # nothing predicts the first token
    if not trainable:
        where = [*at, "masks"]
        message = (
            f"{path(where)} leaves no token to train on: it is {NOT_TRAINED} everywhere, or everywhere but at first tokens, "
            "which nothing predicts"
        )
        raise invalid(where, short(group.masks), message)


def _check_numbers(group: ScoredData, at: list[str | int]) -> None:
    """Check that a trainer can compute with scores, advantages, logprobs and a teacher's ids in
    float32 and in 64 bits.
    """
    index = first_beyond(group.scores, LARGEST_SCORE)
    if index is not None:
        raise beyond(group.scores[index], LARGEST_SCORE, [*at, "scores", index])
    check_magnitudes(group.advantages or [], LARGEST_SCORE, [*at, "advantages"])
    check_magnitudes(group.inference_logprobs or [], LARGEST_FLOAT32, [*at, "inference_logprobs"])
    check_magnitudes(group.ref_logprobs or [], LARGEST_FLOAT32, [*at, "ref_logprobs"])
    for index, rows in enumerate(group.distill_logprobs or []):
        check_magnitudes(rows, LARGEST_FLOAT32, [*at, "distill_logprobs", index])
    for index, ids in enumerate(group.distill_token_ids or []):
        check_magnitudes(ids, LARGEST_ID, [*at, "distill_token_ids", index])


def _check_messages(messages: Any, where: list[str | int]) -> None:
    """Check that the messages of one sequence are objects with a role and a content."""
    rule = "the messages of a sequence are a list of objects with `role` and `content`"
    if not isinstance(messages, list):
        raise invalid(where, short(messages), f"{path(where)} is {short(messages)!r}: {rule}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            there = [*where, index]
            raise invalid(there, short(message), f"{path(there)} is {short(message)!r}: {rule}")


def _check_spans(group: ScoredData, lengths: list[int], at: list[str | int]) -> None:
    """Check that there are at most as many spans as tokens, and one epoch for each.

    The spans need not cover the tokens: an environment may train on fewer tokens than were sampled.
    """
    if group.weight_epoch_spans is not None and group.weight_version_spans is None:
        where = [*at, "weight_epoch_spans"]
        raise invalid(
            where,
            len(group.weight_epoch_spans),
            f"{path(where)} says nothing without weight_version_spans",
        )
    for index, spans in enumerate(group.weight_version_spans or []):
        where = [*at, "weight_version_spans", index]
        covered = sum(tokens for _, tokens in spans)
        if len(spans) > lengths[index] or covered > lengths[index]:
            message = f"{path(where)} has {len(spans)} spans of {covered} tokens, the sequence has {lengths[index]}"
            raise invalid(where, len(spans), message)
        if group.weight_epoch_spans is not None and len(group.weight_epoch_spans[index]) != len(
            spans
        ):
            where = [*at, "weight_epoch_spans", index]
            epochs = len(group.weight_epoch_spans[index])
            raise invalid(
                where,
                epochs,
                f"{path(where)} has {epochs} entries for {len(spans)} spans in weight_version_spans",
            )


def listed(group: ScoredData, name: str) -> list[Any] | None:
    """The entries of a field for each sequence; None where there are none. What is no list is a
    field of the client's own that happens to have this name, and is handed on: the name was free
    once."""
    value = getattr(group, name)
    if value is not None and not isinstance(value, list):
        _say_that_it_is_no_list(name)
        return None
    return value


@cache
def _say_that_it_is_no_list(name: str) -> None:
    """Once for each name."""
    logger.warning(
        "a group's %s is no list with an entry for each sequence: it is handed on as it is, as a field of the client's own, "
        "and says nothing of how sequences were sampled. This is there once",
        name,
    )


def _negatives(row: list[int]) -> int:
    """How many of the numbers are below 0; -1 if one does not fit into 32 bits.

    As fast as every number can be looked at.
    """
    try:
        packed = array("i", row).tobytes()
    except OverflowError:
        return -1
    return len(packed[SIGN_BYTE::4].translate(None, WITHOUT_SIGN))


def _wrong_id(
    row: list[int], where: list[str | int], rule: str, besides: int = 0
) -> InvalidRequestError:
    """The refusal of the first number in a row that is neither a token id nor `besides`."""
    position, value = next(
        (at, id) for at, id in enumerate(row) if not 0 <= id <= LARGEST_ID and id != besides
    )
    where = [*where, position]
    return invalid(where, short(value), f"{path(where)} is {shown(value)}: {rule}")


def check_finish_reason(reason: Any, where: list[str | int]) -> None:
    """Check why the sampling of a sequence ended: a word of the inference server, or None if
    unknown.
    """
    if reason is not None and not (isinstance(reason, str) and len(reason) <= MAX_FINISH_REASON):
        rule = f"it must be a string of at most {MAX_FINISH_REASON} characters, or null"
        raise invalid(where, short(reason), f"{path(where)} is {short(reason)!r}: {rule}")


def check_success(success: Any, where: list[str | int]) -> None:
    """Check whether a sequence solved its item: a boolean, or None if unknown."""
    if success is not None and not isinstance(success, bool):
        raise invalid(
            where,
            short(success),
            f"{path(where)} is {short(success)!r}: it must be true, false or null",
        )


def check_sampling(entry: Any, length: int, where: list[str | int]) -> None:
    """Check how one sequence was sampled.

    It is one object of numbers for the whole sequence, or one for each part with the part's
    `tokens`, or None if unknown.
    """
    if entry is None:
        return
    if not isinstance(entry, list):
        _check_parameters(entry, where)
        return
    if not entry:
        raise invalid(
            where, [], f"{path(where)} is []: leave sampling_params out where it is not known"
        )
    covered = 0
    for place, part in enumerate(entry):
        _check_parameters(part, [*where, place])
        tokens = part.get("tokens")
        if not isinstance(tokens, int) or tokens < 0:
            there = [*where, place, "tokens"]
            raise invalid(
                there,
                short(tokens),
                f"{path(there)} is {short(tokens)!r}: each part says how many tokens it is of",
            )
        covered += tokens
    if covered > length:
        message = f"{path(where)} has {len(entry)} parts of {short(covered)} tokens, the sequence has {length}"
        raise invalid(where, len(entry), message)


def _check_parameters(parameters: Any, where: list[str | int]) -> None:
    """Check that the parameters are finite numbers by name, or null.

    Names that are not in PARAMETERS are the client's own.
    """
    if not isinstance(parameters, dict):
        message = f'{path(where)} is {short(parameters)!r}: it must be an object of numbers, such as {{"temperature": 1.0}}'
        raise invalid(where, short(parameters), message)
    for name in (name for name in PARAMETERS if parameters.get(name) is not None):
        value = parameters[name]
        exact = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
        if not exact and not (isinstance(value, float) and math.isfinite(value)):
            there = [*where, name]
            raise invalid(
                there,
                short(value),
                f"{path(there)} is {short(value)!r}: it must be a finite number",
            )
    temperature = parameters.get("temperature")
    there = [*where, "temperature"]
    if temperature is not None and temperature < 0:
        raise invalid(there, temperature, f"{path(there)} is {temperature}: it must be at least 0")
    if temperature and not LEAST_FLOAT32 <= temperature <= LARGEST_FLOAT32:
        raise invalid(
            there,
            temperature,
            f"{path(there)} is {temperature}: it must be 0, or a number that float32 holds",
        )


def check_free(value: Any, where: list[str | int]) -> None:
    """Check a field of free form: integers of 64 bits, finite floats, and at most DEEPEST levels.

    Raises:
        InvalidRequestError: names the place, the value and the bound.
    """
    # Paths cost several times as much as the checks, so they are made only for a value that is
    # refused.
    if not _is_storable(value, 1):
        _refuse(value, where, 1)


def _is_storable(value: Any, level: int) -> bool:
    if isinstance(value, list):
        return level <= DEEPEST and all(_is_storable(item, level + 1) for item in value)
    if isinstance(value, dict):
        return level <= DEEPEST and all(_is_storable(item, level + 1) for item in value.values())
    return isinstance(value, str) or unstorable(value) is None


def _refuse(value: Any, where: list[str | int], level: int) -> None:
    """Raise the refusal of the first value that cannot be stored."""
    if isinstance(value, list | dict):
        if level > DEEPEST:
            field = where[: len(where) - level + 1]
            message = f"{path(field)} has more than {DEEPEST} levels of lists and objects: flatten it, or send it as text"
            raise invalid(field, short(value), message)
        for key, item in enumerate(value) if isinstance(value, list) else value.items():
            _refuse(item, [*where, key], level + 1)
    elif reason := unstorable(value):
        raise invalid(where, shown(value), f"{path(where)} is {shown(value)}: {reason}")


def check_magnitudes(rows: Sequence[Sequence[float]], bound: float, where: list[str | int]) -> None:
    """Check that no number of `rows` exceeds `bound` in magnitude.

    Raises:
        InvalidRequestError: names the first such number and the bound.
    """
    for index, row in enumerate(rows):
        at = first_beyond(row, bound)
        if at is not None:
            raise beyond(row[at], bound, [*where, index, at])


def beyond(value: float, bound: float, where: list[str | int]) -> InvalidRequestError:
    """The refusal of a number whose magnitude exceeds `bound`."""
    return invalid(
        where,
        shown(value),
        f"{path(where)} is {shown(value)}: its magnitude must be at most {bound:g}",
    )


def unreadable(body: bytes) -> str | None:
    """Return why the JSON reader of trainers and reference workers cannot read `body`; None if it
    can.
    """
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return str(error)
    return None


def shown(value: Any) -> str:
    """A number as text, at most 64 characters. Integers of any size have one."""
    if (
        isinstance(value, int) and abs(value) >= 10**40
    ):  # Python refuses to print integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return str(value)[:64]
