"""What the rollout service accepts, as pydantic models, and the checks that a JSON schema cannot express.

A group is a body of many thousand numbers, so it is read once, by pydantic's own JSON parser, and the bytes that came in
are the bytes that go out: `read_groups` never builds them anew unless a value had to be converted.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from atroposlib.api.state import Draft

LARGEST_BATCH = 1 << 20
"""Sequences. The work of packing a batch grows with its size, so it has a bound."""

LARGEST_ID = 2**31 - 1
"""Token ids fit into 32 bits."""
SIGN_BYTE = 3 if sys.byteorder == "little" else 0
"""Of the four of a 32-bit integer."""
WITHOUT_SIGN = bytes(range(128))
NOT_TRAINED = -100
"""In masks: nothing is learned from this token."""

SafeInt = Annotated[int, Field(ge=-(2**53) + 1, le=2**53 - 1)]
"""An integer that every JSON reader keeps exactly."""
Version = Annotated[int, Field(ge=0, le=2**53 - 1)]
Size = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
Name = Annotated[str, Field(max_length=4096)]

# The first wrong value ends the reading: a million wrong values would otherwise become a million error records.
Ints = Annotated[list[int], Field(fail_fast=True)]
Floats = Annotated[list[FiniteFloat], Field(fail_fast=True)]
IntRows = Annotated[list[Ints], Field(fail_fast=True)]
FloatRows = Annotated[list[Floats], Field(fail_fast=True)]
Versions = Annotated[list[Version], Field(fail_fast=True)]
VersionSpan = Annotated[list[Version], Field(min_length=2, max_length=2)]
VersionSpans = Annotated[list[VersionSpan], Field(fail_fast=True)]


class Request(BaseModel):
    """Unknown keys are ignored, as every client of this wire may rely on."""

    model_config = ConfigDict(extra="ignore")


class RegisterTrainer(Request):
    """POST /register."""

    wandb_group: Name
    wandb_project: Name
    batch_size: Size
    """Sequences per batch."""
    max_token_len: SafeInt
    checkpoint_dir: Name
    save_checkpoint_interval: SafeInt
    starting_step: SafeInt
    num_steps: SafeInt
    max_staleness: Version | None = None
    """Weight versions by which a group may be older than the trainer when it is handed out; null for any age."""
    ack_batches: bool = False
    """The trainer sends POST /batch/ack from the first batch on; without it, the first ack tells."""
    model: Name | None = None
    """The model that is trained. With checkpoint_dir it tells one run from another; null where nothing does."""
    weight_epoch: Version = 0
    """Names this life of the trainer: unix milliseconds of its start, above those of the lives that it continues; 0 if it
    does not say."""


def _or_default(weight: float) -> float:
    if weight < 0 and weight != -1:
        raise ValueError("a weight is at least 0, or -1 for the default")
    return 1.0 if weight == -1 else weight


class RegisterEnv(Request):
    """POST /register-env."""

    max_token_length: SafeInt
    desired_name: Name
    weight: Annotated[FiniteFloat, AfterValidator(_or_default), Field(le=1e9)]
    """Share of the trainer's data relative to the other environments' weights. -1, which stock environments send when
    they have none, is the default, 1."""
    group_size: Size
    min_batch_allocation: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    """Fraction of every batch that is kept for this environment."""


class EnvIdentifier(Request):
    """POST /disconnect-env and GET /status-env."""

    env_id: SafeInt


class AckBatch(Request):
    """POST /batch/ack."""

    batch_id: SafeInt | None = None
    """The id that came with the batch; null for all batches that the trainer holds."""
    weight_version: Version | None = None
    """Optimizer steps behind the trainer's weights now; null counts each batch as one step."""
    uuid: SafeInt | None = None
    """What /register answered; a trainer that was superseded is told so."""
    skipped: Name | None = None
    """Why the trainer could not learn from the batch; null if it did."""
    keep: bool = False
    """What was learned is not saved yet: keep the batch for the trainer that registers next, until it is acknowledged again."""


class EndRun(Request):
    """POST /run/end."""

    uuid: SafeInt
    """What /register answered."""


class ScoredData(BaseModel):
    """POST /scored_data: one group, n sequences that answer the same prompt."""

    model_config = ConfigDict(extra="allow")

    tokens: IntRows
    """Token ids [n][length]."""
    masks: IntRows
    """[n][length]: the token id where it is trained on, -100 elsewhere. At least one token is, other than a first one."""
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
    """[n]: the epoch of those weights, which names the life of the trainer that made them; 0 before any trainer."""
    weight_version_spans: Annotated[list[VersionSpans], Field(fail_fast=True)] | None = None
    """[n][spans][2]: a version and the number of tokens sampled under it, in the order of the sequence's sampled tokens."""
    weight_epoch_spans: Annotated[list[Versions], Field(fail_fast=True)] | None = None
    """[n][spans]: the epoch of the weights of each span."""
    idempotency_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Chosen by the client; the same key again is answered again but not counted again."""


RETURNED = [name for name in ScoredData.model_fields if name != "idempotency_key"]
"""The keys that every group in a batch has, null where nothing was posted."""

PER_SEQUENCE = (
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "distill_token_ids",
    "distill_logprobs",
    "weight_versions",
    "weight_epochs",
    "weight_version_spans",
    "weight_epoch_spans",
)
"""Optional fields with one entry for each sequence."""

_one = TypeAdapter(ScoredData)
_many = TypeAdapter(list[ScoredData])
ModelT = TypeVar("ModelT", bound=BaseModel)


class InvalidRequestError(ValueError):
    """The body does not validate. Holds what a 422 answer lists."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(error["msg"] for error in errors))
        self.errors = errors


def invalid(where: list[str | int], value: Any, message: str) -> InvalidRequestError:
    """One error at one place of the body: its path, the value found there, and what is wrong with it."""
    return InvalidRequestError([{"type": "value_error", "loc": ["body", *where], "msg": message, "input": value}])


def _path(where: list[str | int] | tuple[str | int, ...]) -> str:
    """tokens[0][3]"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".") or "the body"


def _short(value: Any) -> Any:
    """An input value as it can be shown: short, and without NaN, which JSON does not have."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int | float) and not abs(value) < 2**53:
        return str(value)[:64]
    return value if not isinstance(value, str) or len(value) <= 200 else value[:200] + "…"


def _from_pydantic(error: ValidationError) -> InvalidRequestError:
    errors = []
    for item in error.errors(include_url=False, include_context=False)[:20]:
        where = list(item["loc"])
        bare = item["type"] in ("missing", "json_invalid")  # their input is the whole body
        value = None if bare else _short(item["input"])
        message = item["msg"] if bare else f"{_path(where)} is {value!r}: {item['msg']}"
        errors.append({"type": item["type"], "loc": ["body", *where], "msg": message, "input": value})
    return InvalidRequestError(errors)


def read(model: type[ModelT], body: bytes) -> ModelT:
    """Read a small request.

    Raises:
        InvalidRequestError: the body is no JSON, or does not validate.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _from_pydantic(error) from None


def read_groups(body: bytes, many: bool) -> list[Draft]:
    """Read one posted group, or a list of them, and check all that can be checked without the queue.

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
            raise _from_pydantic(error) from None
    if not many:
        exact = not _clear_empty(parsed) and exact
        _check(parsed, [])
        return [_draft(parsed, body.strip() if exact else _dump(parsed))]
    for index, group in enumerate(parsed):
        _clear_empty(group)
        _check(group, [index])
    return [_draft(group, _dump(group)) for group in parsed]


def _clear_empty(group: ScoredData) -> bool:
    """Stock clients send an empty list where they have nothing for any sequence. Returns whether there was one."""
    empty = [name for name in PER_SEQUENCE if getattr(group, name) == [] and group.tokens]
    for name in empty:
        setattr(group, name, None)
    return bool(empty)


def _dump(group: ScoredData) -> bytes:
    return group.model_dump_json(exclude_unset=True).encode()


def _draft(group: ScoredData, body: bytes) -> Draft:
    missing = [name for name in RETURNED if name not in group.model_fields_set]
    if missing:
        body = body[:-1] + "".join(f',"{name}":null' for name in missing).encode() + b"}"
    versions = group.weight_versions or []
    return Draft(
        body=body,
        size=len(group.tokens),
        longest=max(len(row) for row in group.tokens),
        env_id=group.env_id,
        weights=tuple(sorted(set(zip(group.weight_epochs, versions, strict=True))))
        if group.weight_epochs
        else tuple((None, version) for version in sorted(set(versions))),
        key=group.idempotency_key,
    )


def _check(group: ScoredData, at: list[str | int]) -> None:
    """Lengths that must agree, and numbers that must fit."""
    if not group.tokens:
        raise invalid([*at, "tokens"], [], f"{_path([*at, 'tokens'])} is []: a group needs at least one sequence")
    lengths = [len(row) for row in group.tokens]
    if 0 in lengths:
        where = [*at, "tokens", lengths.index(0)]
        raise invalid(where, [], f"{_path(where)} is []: a sequence needs at least one token")
    rows: list[tuple[str, list[Any] | None]] = [
        ("masks", group.masks),
        ("inference_logprobs", group.inference_logprobs),
        ("ref_logprobs", group.ref_logprobs),
        ("advantages", group.advantages),
        ("distill_token_ids", group.distill_token_ids),
        ("distill_logprobs", group.distill_logprobs),
    ]
    if group.weight_epochs and not group.weight_versions:
        where = [*at, "weight_epochs"]
        raise invalid(where, len(group.weight_epochs), f"{_path(where)} says nothing without weight_versions")
    flat: list[tuple[str, list[Any] | None]] = [
        ("scores", group.scores),
        ("weight_versions", group.weight_versions),
        ("weight_epochs", group.weight_epochs),
        ("weight_version_spans", group.weight_version_spans),
        ("weight_epoch_spans", group.weight_epoch_spans),
    ]
    for name, values in rows + flat:
        if values is not None and len(values) != len(lengths):
            where = [*at, name]
            message = f"{_path(where)} has {len(values)} entries for {len(lengths)} sequences in tokens"
            raise invalid(where, len(values), message)
    for name, values in rows:
        for index, row in enumerate(values or []):
            if len(row) != lengths[index] and not (name == "advantages" and len(row) == 1):
                where = [*at, name, index]
                message = f"{_path(where)} has {len(row)} entries for the {lengths[index]} tokens of that sequence"
                raise invalid(where, len(row), message)
    _check_spans(group, lengths, at)
    free = ("messages", "generation_params", "overrides", "group_overrides", "images")
    for name, value in [*((name, getattr(group, name)) for name in free), *(group.model_extra or {}).items()]:
        _refuse_non_finite(value, [*at, name])
    for index, row in enumerate(group.tokens):
        if _negatives(row) != 0:
            raise _wrong_id(row, [*at, "tokens", index], f"a token id is from 0 to {LARGEST_ID}")
    trainable = False
    for index, row in enumerate(group.masks):
        negatives = _negatives(row)
        if negatives and row.count(NOT_TRAINED) != negatives:
            rule = f"a mask holds {NOT_TRAINED} where nothing is trained on, and a token id from 0 to {LARGEST_ID} elsewhere"
            raise _wrong_id(row, [*at, "masks", index], rule, NOT_TRAINED)
        trainable = trainable or len(row) - negatives > (row[0] != NOT_TRAINED)  # nothing predicts the first token
    if not trainable:
        where = [*at, "masks"]
        message = (
            f"{_path(where)} leaves no token to train on: it is {NOT_TRAINED} everywhere, or everywhere but at first tokens, "
            "which nothing predicts"
        )
        raise invalid(where, _short(group.masks), message)


def _check_spans(group: ScoredData, lengths: list[int], at: list[str | int]) -> None:
    """That there are no more spans than tokens, and one epoch for each. Whether they cover the tokens is for who uses them to
    see: an environment may train on fewer tokens than were sampled."""
    if group.weight_epoch_spans is not None and group.weight_version_spans is None:
        where = [*at, "weight_epoch_spans"]
        raise invalid(where, len(group.weight_epoch_spans), f"{_path(where)} says nothing without weight_version_spans")
    for index, spans in enumerate(group.weight_version_spans or []):
        where = [*at, "weight_version_spans", index]
        covered = sum(tokens for _, tokens in spans)
        if len(spans) > lengths[index] or covered > lengths[index]:
            message = f"{_path(where)} has {len(spans)} spans of {covered} tokens, the sequence has {lengths[index]}"
            raise invalid(where, len(spans), message)
        if group.weight_epoch_spans is not None and len(group.weight_epoch_spans[index]) != len(spans):
            where = [*at, "weight_epoch_spans", index]
            epochs = len(group.weight_epoch_spans[index])
            raise invalid(where, epochs, f"{_path(where)} has {epochs} entries for {len(spans)} spans in weight_version_spans")


def _negatives(row: list[int]) -> int:
    """How many of the numbers are below 0; -1 if one does not fit into 32 bits. As fast as every number can be looked at."""
    try:
        packed = array("i", row).tobytes()
    except OverflowError:
        return -1
    return len(packed[SIGN_BYTE::4].translate(None, WITHOUT_SIGN))


def _wrong_id(row: list[int], where: list[str | int], rule: str, besides: int = 0) -> InvalidRequestError:
    """The refusal of the first number in a row that is neither a token id nor `besides`."""
    position, value = next((at, id) for at, id in enumerate(row) if not 0 <= id <= LARGEST_ID and id != besides)
    where = [*where, position]
    return invalid(where, _short(value), f"{_path(where)} is {str(value)[:64]}: {rule}")


def _refuse_non_finite(value: Any, where: list[str | int]) -> None:
    """Raise if a number in a field of free form is NaN or infinite, which JSON cannot carry on."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise invalid(where, str(value), f"{_path(where)} is {value}: every number must be finite")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_non_finite(item, [*where, index])
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_non_finite(item, [*where, key])
