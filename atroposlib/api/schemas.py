"""What the rollout service accepts, as pydantic models, and the checks that a JSON schema cannot express.

A group is a body of many thousand numbers, so it is read once, by pydantic's own JSON parser, and the bytes that came in
are the bytes that go out: `read_groups` never builds them anew unless a value had to be converted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator

from atroposlib.api.fleet import MOST_SERVERS, first_double
from atroposlib.api.group_checks import check_group
from atroposlib.api.refusals import InvalidRequestError, path, short
from atroposlib.api.replay import Policy
from atroposlib.api.state import Draft
from atroposlib.api.streams import MOST_STREAMS, place_in_stream
from atroposlib.utils.addresses import LONGEST, server_address

MOST_OF_A_REASON = 4096
"""Characters: a table is not refused because one of its servers has much to say."""
LARGEST_BATCH = 1 << 20
"""Sequences. The work of packing a batch grows with its size, so it has a bound."""

SafeInt = Annotated[int, Field(ge=-(2**53) + 1, le=2**53 - 1)]
"""An integer that every JSON reader keeps exactly."""
Version = Annotated[int, Field(ge=0, le=2**53 - 1)]
Size = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
Name = Annotated[str, Field(max_length=4096)]
ShortName = Annotated[str, Field(max_length=64)]
Key = Annotated[str, Field(min_length=1, max_length=256)]
MetricName = Annotated[str, Field(min_length=1, max_length=256)]
ServerUrl = Annotated[str, Field(max_length=LONGEST), AfterValidator(server_address)]
"""http://host:port, or https."""

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


class WantedReplay(Request):
    """In which order groups are used, and how often."""

    policy: Policy = "fifo"
    """fifo: oldest first. recent: newest weights first. uniform: at random among all that wait."""
    max_reuse: Annotated[int, Field(ge=1, le=1024)] = 1
    """Batches that a group may be learned from in."""
    seed: Version = 0
    """Of uniform's choices."""


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
    positions: Annotated[dict[Name, Version], Field(max_length=MOST_STREAMS)] | None = None
    """Those of the last batch that the weights have learned from, {} before the first; null if they are not known."""
    ref_logprobs_from_workers: bool = False
    """Groups that come without ref_logprobs get them from reference workers (POST /reference/lease) before they are handed
    out. Needs `model`: by it workers are told from those of another one."""
    reference: Annotated[dict[ShortName, SafeInt | FiniteFloat | bool | Name | None], Field(max_length=64)] | None = None
    """How they are to be computed, for the workers to compare with. If it names a `model`, theirs is compared with that one."""

    replay: WantedReplay | None = None
    """Null for fifo and each group once. Anything else needs max_staleness, by which old groups are dropped; groups that are
    used again are one version older at least."""

    @model_validator(mode="after")
    def _replayed_groups_age(self) -> Self:
        replay = self.replay or WantedReplay()
        if replay.policy != "fifo" and self.max_staleness is None:
            raise ValueError(f"replay {replay.policy!r} needs max_staleness: nothing else drops the groups that it passes over")
        if replay.max_reuse > 1 and not self.max_staleness:
            raise ValueError(
                f"max_reuse {replay.max_reuse} needs max_staleness, at least 1: a group that was learned from is of older "
                "weights than the trainer has afterwards"
            )
        return self

    @model_validator(mode="after")
    def _workers_know_the_model(self) -> Self:
        if self.ref_logprobs_from_workers and self.model is None:
            raise ValueError("ref_logprobs_from_workers needs model, which tells reference workers whose logprobs are meant")
        return self


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
    stream: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Names the stream of items that it serves, if it can be resumed exactly: it numbers them, and GET /status-env tells it
    where the stream stands. It takes the place of an environment that served the same stream before."""


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


class PostedEvaluation(Request):
    """POST /evaluations."""

    env_id: SafeInt | None = None
    """What /register-env answered; null if the environment is not registered."""
    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Of the environment, or of the evaluation."""
    weight_version: Version | None = None
    """Of the oldest weights that it was measured with; null if that is not known."""
    weight_epoch: Version | None = None
    """Of those weights; null if that is not known, 0 for those that no trainer made, or where the server does not say."""
    metrics: Annotated[dict[MetricName, FiniteFloat], Field(min_length=1, max_length=256)]
    idempotency_key: Key | None = None
    """Chosen by the client; the same key again is answered again but not counted again."""


class ServerAddress(Request):
    """POST /fleet/join and POST /fleet/leave."""

    url: ServerUrl


class PublishedServer(Request):
    """One inference server, as the trainer sees it."""

    url: ServerUrl
    standing: Literal["joining", "good", "quarantined", "away"]
    weight_version: SafeInt | None = None
    """Of the weights that it serves; null if that is not known."""
    weight_epoch: SafeInt | None = None
    since: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """When it came to stand so, in Unix seconds."""
    reason: Annotated[str, AfterValidator(lambda reason: reason[:MOST_OF_A_REASON])] = ""
    """Why it is not good; its beginning is kept."""


def _each_once(servers: list[PublishedServer]) -> list[PublishedServer]:
    if (double := first_double(server.url for server in servers)) is not None:
        raise ValueError(f"{double} is listed twice; list each server once")
    return servers


class PublishedFleet(Request):
    """POST /fleet."""

    servers: Annotated[list[PublishedServer], Field(max_length=MOST_SERVERS), AfterValidator(_each_once)]
    uuid: SafeInt | None = None
    """What /register answered; a trainer that was superseded is told so, and its table is not taken."""
    by: Annotated[str, Field(max_length=256)] = ""
    """Which of several publishers says it, such as a parameter server; empty for the trainer."""


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
    sampling_params: Any | None = None
    """[n]: of the distribution that the sequence's tokens were sampled from, an object of numbers: `temperature`, and what was
    not neutral of `top_p`, `top_k`, `min_p`, `presence_penalty`, `frequency_penalty`, `repetition_penalty` and `min_tokens`;
    `constrained` if something else changed it; and `max_tokens` of the last request. A sequence whose turns were sampled in
    different ways has a list of such objects instead, each with `tokens`, the number of sampled tokens that it is of, in their
    order. Null where it is not known. What is no list is a client's own, and is handed on as it is."""
    finish_reasons: Any | None = None
    """[n]: why the sampling of the sequence ended: "stop", "length" or another word of the server's. Of its last turn; null
    where it is not known. What is no list is a client's own, and is handed on as it is."""
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
    "weight_versions",
    "weight_epochs",
    "weight_version_spans",
    "weight_epoch_spans",
    "sampling_params",
    "finish_reasons",
)
"""Optional fields with one entry for each sequence."""

_one = TypeAdapter(ScoredData)
_many = TypeAdapter(list[ScoredData])
ModelT = TypeVar("ModelT", bound=BaseModel)


def _from_pydantic(error: ValidationError) -> InvalidRequestError:
    errors = []
    for item in error.errors(include_url=False, include_context=False)[:20]:
        where = list(item["loc"])
        bare = item["type"] in ("missing", "json_invalid")  # their input is the whole body
        value = None if bare else short(item["input"])
        message = item["msg"] if bare else f"{path(where)} is {value!r}: {item['msg']}"
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
        exact = not _clear_empty(parsed) and not _says_that_none_are_referenced(parsed) and exact
        check_group(parsed, [])
        return [_draft(parsed, body.strip() if exact else _dump(parsed))]
    for index, group in enumerate(parsed):
        _clear_empty(group)
        check_group(group, [index])
    return [_draft(group, _dump(group)) for group in parsed]


def _clear_empty(group: ScoredData) -> bool:
    """Stock clients send an empty list where they have nothing for any sequence. Returns whether there was one."""
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


def _draft(group: ScoredData, body: bytes) -> Draft:
    missing = [name for name in RETURNED if name not in group.model_fields_set and name != "ref_logprobs"]
    referenced = group.ref_logprobs is not None
    if missing or not referenced:
        ends = b"}" if referenced else NO_REFERENCE
        body = body[:-1] + "".join(f',"{name}":null' for name in missing).encode() + ends
    lengths = [len(row) for row in group.tokens]
    versions = group.weight_versions or []
    return Draft(
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
