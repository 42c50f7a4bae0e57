"""Reads posted groups: their model, the checks beyond the types of its fields, and how a group becomes
a validated one. Large posts are read in a process of their own.

A group is a body of many thousand numbers, so it is read once. The bytes that came in are the bytes
that go out: `read_groups` encodes them again only if a value had to be converted.

Reading JSON keeps the interpreter to itself until it is done, in whichever thread. While 100 MB are
read, nothing else of the process is answered. So a child process reads large bodies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

from atroposlib.service.records import ValidatedGroup
from atroposlib.service.schemas import (
    InvalidRequestError,
    invalid,
    path,
    refused,
    short,
)
from atroposlib.utils.processes import ChildDied, KillableCalls, StartFailed, TooMuchMemory
from atroposlib.wire import (
    CONSTRAINED,
    GROUP_FIELDS,
    LARGEST_FLOAT32,
    LARGEST_ID,
    LARGEST_INTEGER,
    LEAST_FLOAT32,
    NEUTRAL,
    NUMBERS,
    PER_SEQUENCE,
    PER_TOKEN,
    PLAIN,
    PROMPT_MASK,
    REQUIRED,
    ScoredDataGroup,
    path_beyond,
    unstorable,
)

logger = logging.getLogger(__name__)

SIGN_BYTE = 3 if sys.byteorder == "little" else 0
"""Index of the byte of a 32-bit integer that has its sign."""
WITHOUT_SIGN = bytes(range(128))
DEEPEST = 100
"""Levels of lists and objects within a field of free form. The JSON readers of clients stop between
200 and 1,024."""
MAX_FINISH_REASON = 64
"""Characters of a finish reason."""
PARAMETERS = ("temperature", *NEUTRAL, CONSTRAINED, "max_tokens", "tokens")
"""Names that the service reads in an entry of sampling_params."""


@with_config(ConfigDict(extra="allow"))
class ScoredData(ScoredDataGroup):
    """POST /scored_data: one group, n sequences that answer the same prompt."""


Group = Mapping[str, Any]
"""A `ScoredData`, with a client's own keys. Absent fields are absent."""
RETURNED = [name for name in GROUP_FIELDS if name != "idempotency_key"]
"""The keys that every group in a batch has, null where nothing was posted."""

KNOWN = {*GROUP_FIELDS, "stream", "stream_item", "stream_life"}
"""The keys that have a meaning to the service or the trainer."""

REFERENCE_KEY = b',"ref_logprobs":'
"""The last key in the body of a group that came without: so that they can be put there."""
NO_REFERENCE = REFERENCE_KEY + b"null}"

_one: TypeAdapter[Any] = TypeAdapter(ScoredData)
_many: TypeAdapter[Any] = TypeAdapter(list[ScoredData])


def read_groups(body: bytes, many: bool) -> list[ValidatedGroup]:
    """Read one posted group, or a list of them, and check all that can be checked without the
    queue.

    Raises:
        InvalidRequestError: names the wrong field, its index and its value.
    """
    adapter = _many if many else _one
    try:  # by the JSON reader that trainers have
        parsed = adapter.validate_python(orjson.loads(body), strict=True)
        exact = not any(_may_be_integer(value) for value in _free_values(parsed, many))
    except (orjson.JSONDecodeError, ValidationError):
        exact = False
    if not exact:
        try:  # "7" and 7.0 are taken for 7, as they always were on this wire
            parsed = adapter.validate_json(body)
        except ValidationError as error:
            raise refused(error) from None
        _refuse_booleans(from_json(body), [])
    if not many:
        # A null for ref_logprobs may stand anywhere in the body, where none could be put later.
        null_reference = parsed.get("ref_logprobs", "absent") is None
        exact = not _clear_empty(parsed) and not null_reference and exact
        check_group(parsed, [])
        body = body.strip() if exact else _dump(parsed)
        return [_validated(parsed, body)]
    for index, group in enumerate(parsed):
        _clear_empty(group)
        check_group(group, [index])
    return [_validated(group, _dump(group)) for group in parsed]


def _refuse_booleans(value: Any, where: list[str | int]) -> None:
    """Refuse true and false where a group has numbers; pydantic takes them for 1 and 0.

    Args:
        value: a body as it came, or a part of it.
        where: the path of the part.

    Raises:
        InvalidRequestError: names the field, the index and the value.
    """
    if isinstance(value, bool):
        rule = "a boolean is not a number: send a number such as 1 or 0.5"
        raise _unfit(where, value, rule)
    if isinstance(value, dict):
        for name in (*NUMBERS, "env_id"):
            _refuse_booleans(value.get(name), [*where, name])
    elif isinstance(value, list) and not PLAIN.issuperset(map(type, value)):
        for index, entry in enumerate(value):
            _refuse_booleans(entry, [*where, index])


def _free_values(parsed: Any, many: bool) -> Iterator[Any]:
    """Yield the fields of free form."""
    for group in parsed if many else [parsed]:
        yield from (value for name, value in group.items() if name not in NUMBERS)


def _may_be_integer(value: Any, level: int = 1) -> bool:
    """Return True if a float in `value` may have been an integer above 64 bits in the body.

    orjson makes a float of such an integer, which loses digits. Levels below DEEPEST are not
    searched: they are refused later.
    """
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return level <= DEEPEST and any(_may_be_integer(item, level + 1) for item in items)
    return isinstance(value, float) and abs(value) > LARGEST_INTEGER / 2


def _clear_empty(group: dict[str, Any]) -> bool:
    """Set optional fields that are `[]` to None. Return True if there was one.

    Stock clients send an empty list where they have nothing for any sequence.
    """
    empty = [name for name in PER_SEQUENCE if group.get(name) == [] and name not in REQUIRED]
    group.update(dict.fromkeys(empty))
    return bool(empty)


def _dump(group: Group) -> bytes:
    """Return the group as JSON, without ref_logprobs that are null: their key must come last."""
    absent = {"ref_logprobs"} if group.get("ref_logprobs") is None else None
    return _one.dump_json(group, exclude=absent)


def _validated(group: Group, body: bytes) -> ValidatedGroup:
    referenced = group.get("ref_logprobs") is not None
    missing = [name for name in RETURNED if name not in group and name != "ref_logprobs"]
    if missing or not referenced:
        ends = b"}" if referenced else NO_REFERENCE
        nulls = "".join(f',"{name}":null' for name in missing).encode()
        body = b"".join([memoryview(body)[:-1], nulls, ends])
    lengths = [len(row) for row in group["tokens"]]
    versions = group.get("weight_versions") or []
    epochs = group.get("weight_epochs") or [None] * len(versions)
    return ValidatedGroup(
        body=body,
        size=len(lengths),
        longest=max(lengths),
        env_id=group.get("env_id"),
        weights=tuple(sorted(set(zip(epochs, versions, strict=True)))),
        key=group.get("idempotency_key"),
        tokens=sum(lengths),
        referenced=referenced,
        unknown=tuple(sorted(group.keys() - KNOWN)),
        **place_in_stream(group),
    )


def with_reference(body: bytes, ref_logprobs: bytes = b"null") -> bytes:
    """The body of a group with this reference, in place of its own.

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


def check_group(group: Group, at: list[str | int]) -> None:
    """Check the lengths that must agree, and the numbers that must fit.

    Raises:
        InvalidRequestError: names the field, the index and the value.
    """
    if not group["tokens"]:
        raise _wrong([*at, "tokens"], [], "is []: a group needs at least one sequence")
    lengths = [len(row) for row in group["tokens"]]
    if 0 in lengths:
        where = [*at, "tokens", lengths.index(0)]
        raise _wrong(where, [], "is []: a sequence needs at least one token")
    _check_lengths(group, lengths, at)
    _check_weights(group, lengths, at)
    for name, marker in NUMBERS.items():
        if marker.largest is not None:
            check_magnitudes(group.get(name) or [], marker.largest, [*at, name])
    _check_entries(group, lengths, at)
    for name, value in group.items():
        if name not in NUMBERS:
            check_free(value, [*at, name])
    _check_ids(group, at)


def _check_lengths(group: Group, lengths: list[int], at: list[str | int]) -> None:
    """Check that each field has one entry for each sequence, and each row of a per-token field one
    for each token.
    """
    for name in PER_SEQUENCE:
        entries = listed(group, name)
        if entries is not None and len(entries) != len(lengths):
            text = f"has {len(entries)} entries for {len(lengths)} sequences in tokens"
            raise _wrong([*at, name], len(entries), text)
    for name, marker in PER_TOKEN.items():
        for index, row in enumerate(group.get(name) or []):
            if len(row) != lengths[index] and not (marker.one_for_all and len(row) == 1):
                text = f"has {len(row)} entries for the {lengths[index]} tokens of that sequence"
                raise _wrong([*at, name, index], len(row), text)


def _check_weights(group: Group, lengths: list[int], at: list[str | int]) -> None:
    """Check that epochs come with versions, and that there are at most as many spans as tokens.

    The spans need not cover the tokens: an environment may train on fewer tokens than were sampled.
    """
    for epochs, versions in (
        ("weight_epochs", "weight_versions"),
        ("weight_epoch_spans", "weight_version_spans"),
    ):
        if group.get(epochs) is not None and group.get(versions) is None:
            raise _wrong([*at, epochs], len(group[epochs]), f"has no meaning without {versions}")
    epoch_spans = group.get("weight_epoch_spans")
    for index, spans in enumerate(group.get("weight_version_spans") or []):
        covered = sum(tokens for _, tokens in spans)
        if len(spans) > lengths[index] or covered > lengths[index]:
            text = f"has {len(spans)} spans of {covered} tokens, the sequence has {lengths[index]}"
            raise _wrong([*at, "weight_version_spans", index], len(spans), text)
        if epoch_spans is not None and len(epoch_spans[index]) != len(spans):
            count = len(epoch_spans[index])
            text = f"has {count} entries for {len(spans)} spans in weight_version_spans"
            raise _wrong([*at, "weight_epoch_spans", index], count, text)


def _check_entries(group: Group, lengths: list[int], at: list[str | int]) -> None:
    """Check the entries that describe one sequence each."""
    for index, entry in enumerate(listed(group, "sampling_params") or []):
        check_sampling(entry, lengths[index], [*at, "sampling_params", index])
    for index, reason in enumerate(listed(group, "finish_reasons") or []):
        is_word = isinstance(reason, str) and len(reason) <= MAX_FINISH_REASON
        if reason is not None and not is_word:
            rule = f"it must be a string of at most {MAX_FINISH_REASON} characters, or null"
            raise _unfit([*at, "finish_reasons", index], reason, rule)
    for index, success in enumerate(listed(group, "successes") or []):
        if success is not None and not isinstance(success, bool):
            raise _unfit([*at, "successes", index], success, "it must be true, false or null")
    for index, messages in enumerate(group.get("messages") or []):
        _check_messages(messages, [*at, "messages", index])


def _check_messages(messages: Any, where: list[str | int]) -> None:
    """Check that the messages of one sequence are objects with a role and a content."""
    rule = "the messages of a sequence are a list of objects with `role` and `content`"
    if not isinstance(messages, list):
        raise _unfit(where, messages, rule)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise _unfit([*where, index], message, rule)


def _check_ids(group: Group, at: list[str | int]) -> None:
    """Check the token ids of tokens and masks, and that at least one token is trained on."""
    for index, row in enumerate(group["tokens"]):
        if _negatives(row) != 0:
            raise _wrong_id(row, [*at, "tokens", index], f"a token id is from 0 to {LARGEST_ID}")
    trainable = False
    for index, row in enumerate(group["masks"]):
        negatives = _negatives(row)
        if negatives and row.count(PROMPT_MASK) != negatives:
            rule = (
                f"a mask holds {PROMPT_MASK} where nothing is trained on, and a token id "
                f"from 0 to {LARGEST_ID} elsewhere"
            )
            raise _wrong_id(row, [*at, "masks", index], rule, PROMPT_MASK)
        if not negatives and 0 in row and max(row) == 1 and row != group["tokens"][index]:
            text = (
                f"has only 0 and 1: write {PROMPT_MASK} where nothing is trained on, and the token "
                "id elsewhere"
            )
            raise _wrong([*at, "masks", index], short(row), text)
        # Nothing predicts the first token.
        trainable = trainable or len(row) - negatives > (row[0] != PROMPT_MASK)
    if not trainable:
        text = (
            f"leaves no token to train on: it is {PROMPT_MASK} everywhere, or everywhere but at "
            "first tokens, which nothing predicts"
        )
        raise _wrong([*at, "masks"], short(group["masks"]), text)


def _wrong(where: list[str | int], value: Any, text: str) -> InvalidRequestError:
    """Return the refusal of the field at `where`."""
    return invalid(where, value, f"{path(where)} {text}")


def _unfit(where: list[str | int], value: Any, rule: str) -> InvalidRequestError:
    """Return the refusal of a value of no number type, with the rule that it breaks."""
    return _wrong(where, short(value), f"is {short(value)!r}: {rule}")


def _unfit_number(where: list[str | int], value: Any, rule: str) -> InvalidRequestError:
    return _wrong(where, short(value), f"is {short(value)}: {rule}")


def listed(group: Group, name: str) -> list[Any] | None:
    """Return the entries of a field for each sequence; None if it has none.

    A value that is not a list is a field of the client's own, since the name was free once. It is
    handed on.
    """
    value = group.get(name)
    if value is not None and not isinstance(value, list):
        _warn_of_another_field(name)
        return None
    return value


@cache
def _warn_of_another_field(name: str) -> None:
    """Warn once for each name."""
    logger.warning(
        "a group's %s is not a list with an entry for each sequence: it is handed on unread, as a "
        "field of the client's own. This line is logged once for each field",
        name,
    )


def _negatives(row: list[int]) -> int:
    """Return how many of the numbers are below 0; -1 if one does not fit into 32 bits.

    Nothing that looks at every number is faster.
    """
    try:
        packed = struct.pack(f"{len(row)}i", *row)
    except struct.error:
        return -1
    return len(packed[SIGN_BYTE::4].translate(None, WITHOUT_SIGN))


def _wrong_id(
    row: list[int], where: list[str | int], rule: str, besides: int = 0
) -> InvalidRequestError:
    """Return the refusal of the first number in a row that is neither a token id nor `besides`."""
    position, value = next(
        (at, id) for at, id in enumerate(row) if not 0 <= id <= LARGEST_ID and id != besides
    )
    return _unfit_number([*where, position], value, rule)


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
        raise _wrong(where, [], "is []: leave sampling_params out where it is not known")
    covered = 0
    for index, part in enumerate(entry):
        _check_parameters(part, [*where, index])
        tokens = part.get("tokens")
        if not isinstance(tokens, int) or tokens < 0:
            rule = "each part has its number of tokens"
            raise _unfit([*where, index, "tokens"], tokens, rule)
        covered += tokens
    if covered > length:
        text = f"has {len(entry)} parts of {short(covered)} tokens, the sequence has {length}"
        raise _wrong(where, len(entry), text)


def _check_parameters(parameters: Any, where: list[str | int]) -> None:
    """Check that the parameters are finite numbers by name, or null.

    Names that are not in PARAMETERS are the client's own.
    """
    if not isinstance(parameters, dict):
        rule = 'it must be an object of numbers, such as {"temperature": 1.0}'
        raise _unfit(where, parameters, rule)
    for name in (name for name in PARAMETERS if parameters.get(name) is not None):
        value = parameters[name]
        exact = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
        if not exact and not (isinstance(value, float) and math.isfinite(value)):
            raise _unfit([*where, name], value, "it must be a finite number")
    temperature = parameters.get("temperature")
    if not temperature:
        return
    there = [*where, "temperature"]
    if temperature < 0:
        raise _unfit_number(there, temperature, "it must be at least 0")
    if not LEAST_FLOAT32 <= temperature <= LARGEST_FLOAT32:
        raise _unfit_number(there, temperature, "it must be 0, or a number that float32 holds")


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
            text = f"has more than {DEEPEST} levels of lists and objects: flatten it, or send it as text"
            raise _wrong(where[: len(where) - level + 1], short(value), text)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _refuse(item, [*where, key], level + 1)
    elif reason := unstorable(value):
        raise _unfit_number(where, value, reason)


def check_magnitudes(values: Sequence[Any], bound: float, where: list[str | int]) -> None:
    """Check that no number exceeds `bound` in magnitude, in lists of any depth.

    Raises:
        InvalidRequestError: names the first such number and the bound.
    """
    indices = path_beyond(values, bound)
    if indices is not None:
        value: Any = values
        for index in indices:
            value = value[index]
        raise _unfit_number([*where, *indices], value, f"its magnitude must be at most {bound:g}")


def unreadable(body: bytes) -> str | None:
    """Return why the JSON reader of trainers and reference workers cannot read `body`; None if it
    can.
    """
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return str(error)
    return None


# ---- the process that reads large posts ----

IN_A_PROCESS_FROM = 1 << 20
"""Bytes of a body above which reading it would hold up other requests: about ten milliseconds."""
KEEP_UP_TO = 32 << 20
"""Bytes of a body after which the child ends, and its memory with it."""
MEMORY_PER_BYTE = 20
"""Memory of the child for each byte of the largest body. A group of many long sequences needs
13."""
MEMORY_BESIDES = 256 << 20
"""Memory of the child beyond that, in bytes."""


class ReaderError(RuntimeError):
    """The process that reads large posts did not answer."""


class TooComplexError(RuntimeError):
    """Reading a post takes more memory than the process that reads it may have."""


class GroupReader:
    """Reads bodies for an event loop, the large ones one after the other in a child process.

    Args:
        timeout: seconds for one large body.
        max_body: bytes of the largest body, from which the bound on the child's memory follows.
    """

    def __init__(self, timeout: float = 60.0, max_body: int = 256 << 20) -> None:
        self.timeout = timeout
        self.child_memory = MEMORY_BESIDES + MEMORY_PER_BYTE * max_body
        self._calls = KillableCalls(memory=self.child_memory)
        self._turn = asyncio.Lock()

    async def read(self, body: bytes, many: bool) -> list[ValidatedGroup]:
        """Return the groups in a body.

        Raises:
            InvalidRequestError: as `read_groups` does.
            TooComplexError: the child needed more memory than its bound.
            ReaderError: the child ended twice, took too long, or could not be started.
        """
        if len(body) < IN_A_PROCESS_FROM:
            return read_groups(body, many)
        async with self._turn:
            try:
                return await self._calls.call(read_groups, body, many, seconds=self.timeout)
            except TooMuchMemory:
                raise TooComplexError(
                    f"reading this body of {len(body)} bytes takes more than "
                    f"{self.child_memory >> 20} MiB of memory, the bound of the process that "
                    "reads long posts. Post fewer groups at once"
                ) from None
            except (ChildDied, StartFailed, TimeoutError) as error:
                raise ReaderError(
                    "the process that reads large posts ended or took longer than "
                    f"{self.timeout:g} s ({type(error).__name__}: {error}); is there enough "
                    "memory? Post fewer groups at once"
                ) from None
            finally:
                if len(body) > KEEP_UP_TO:
                    self._calls.close()

    def close(self) -> None:
        """End the child, whatever it does."""
        self._calls.close()
