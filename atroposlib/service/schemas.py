"""What the rollout service is asked, as pydantic models, and how what does not validate is refused:
by its place and its value.

Posted groups, which are long, are read in `groups`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from atroposlib.service.records import MAX_POSITIONS, MAX_SERVERS, Policy
from atroposlib.web.addresses import MAX_ADDRESS_LENGTH, server_address
from atroposlib.wire.numbers import LARGEST_FLOAT32, refuse_boolean
from atroposlib.wire.weight_lineage import MOST_LIVES

MAX_REASON = 300
"""Characters of the reason why a batch is set aside."""
MAX_SERVER_REASON = 4096
"""Characters: a table is not refused because one of its servers has much to say."""
LARGEST_BATCH = 1 << 20
"""Sequences. The work of packing a batch grows with its size, so it has a bound."""
MAX_LEASED_TOKENS = 1 << 22
"""At a reference worker at a time, by one request: its answer is read at once."""
MAX_UNIX_SECONDS = 253402300799.0
"""The end of the year 9999, the last that a date can have."""

SafeInt = Annotated[int, Field(ge=-(2**53) + 1, le=2**53 - 1)]
"""An integer that every JSON reader keeps exactly."""
Version = Annotated[int, Field(ge=0, le=2**53 - 1)]
EpochAndStep = Annotated[list[Version], Field(min_length=2, max_length=2)]
Reason = Annotated[str, AfterValidator(lambda reason: " ".join(reason.split())[:MAX_REASON])]
"""For a line of the log; its beginning is kept."""
RunName = Annotated[str, Field(min_length=1, max_length=256)]
Size = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
Name = Annotated[str, Field(max_length=4096)]
ShortName = Annotated[str, Field(max_length=64)]
Key = Annotated[str, Field(min_length=1, max_length=256)]
WorkerName = Annotated[str, Field(min_length=1, max_length=256)]
MetricName = Annotated[str, Field(min_length=1, max_length=256)]
ServerUrl = Annotated[str, Field(max_length=MAX_ADDRESS_LENGTH), AfterValidator(server_address)]
"""http://host:port, or https."""

# The first wrong value ends the reading: a million wrong values would otherwise become a million
# error records.
Ints = Annotated[list[int], Field(fail_fast=True)]
Floats = Annotated[list[FiniteFloat], Field(fail_fast=True)]
IntRows = Annotated[list[Ints], Field(fail_fast=True)]
FloatRows = Annotated[list[Floats], Field(fail_fast=True)]
Versions = Annotated[list[Version], Field(fail_fast=True)]
VersionSpan = Annotated[list[Version], Field(min_length=2, max_length=2)]
VersionSpans = Annotated[list[VersionSpan], Field(fail_fast=True)]

Number = Annotated[FiniteFloat, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]
"""A number that stays finite in float32, in which TensorBoard and most loggers keep it."""
NumberRows = Annotated[list[Annotated[list[Number], Field(fail_fast=True)]], Field(fail_fast=True)]
Time = Annotated[FiniteFloat, Field(ge=0, le=MAX_UNIX_SECONDS)]

ModelT = TypeVar("ModelT", bound=BaseModel)


class InvalidRequestError(ValueError):
    """The body does not validate. Holds what a 422 answer lists."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(error["msg"] for error in errors))
        self.errors = errors


def invalid(where: list[str | int], value: Any, message: str) -> InvalidRequestError:
    """One error at one place of the body: its path, the value found there, and what is wrong with
    it.
    """
    return InvalidRequestError(
        [{"type": "value_error", "loc": ["body", *where], "msg": message, "input": value}]
    )


def path(where: list[str | int] | tuple[str | int, ...]) -> str:
    """tokens[0][3]"""
    return (
        "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
        or "the body"
    )


def short(value: Any) -> Any:
    """An input value as it can be shown: short, and without NaN, which JSON does not have."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if (
        isinstance(value, int) and abs(value) >= 10**40
    ):  # Python refuses to print integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int | float) and not abs(value) < 2**53:
        return str(value)[:64]
    return value if not isinstance(value, str) or len(value) <= 200 else value[:200] + "…"


def refused(error: ValidationError) -> InvalidRequestError:
    """What a 422 answer lists of pydantic's findings: the first twenty."""
    errors = []
    for item in error.errors(include_url=False, include_context=False)[:20]:
        where = list(item["loc"])
        bare = item["type"] in ("missing", "json_invalid")  # their input is the whole body
        value = None if bare else short(item["input"])
        rule = item["msg"]
        if (
            item["type"] == "float_type" and type(item["input"]) is int
        ):  # an integer that no float can hold
            rule = f"Input should be less than or equal to {LARGEST_FLOAT32:g} in magnitude"
        message = rule if bare else f"{path(where)} is {value!r}: {rule}"
        errors.append(
            {"type": item["type"], "loc": ["body", *where], "msg": message, "input": value}
        )
    return InvalidRequestError(errors)


def read(model: type[ModelT], body: bytes) -> ModelT:
    """Read a small request.

    Raises:
        InvalidRequestError: the body is no JSON, or does not validate.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise refused(error) from None


class Request(BaseModel):
    """Unknown keys are ignored, as every client of this wire may rely on."""

    model_config = ConfigDict(extra="ignore")

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):  # lists are left alone: some hold a million numbers
            refuse_boolean(cls.model_fields[str(info.field_name)].annotation, value)
        return value


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
    """Weight versions by which a group may be older than the trainer when it is handed out; null
    for any age."""
    ack_batches: bool = False
    """The trainer sends POST /batch/ack from the first batch on; without it, the first ack
    tells."""
    model: Name | None = None
    """The model that is trained. With checkpoint_dir it tells one run from another; null where
    nothing does."""
    weight_epoch: Version = 0
    """Names this trainer process: what POST /weight-epoch answered; 0 if it does not say."""
    run: RunName | None = None
    """Names the run, over all its resumes: another name is another run. Null where model and
    checkpoint_dir tell runs apart."""
    lives: Annotated[list[EpochAndStep], Field(max_length=MOST_LIVES)] | None = None
    """[weight epoch, starting step] of each trainer of the run, this one last, as its checkpoints
    name them."""
    positions: Annotated[dict[Name, Version], Field(max_length=MAX_POSITIONS)] | None = None
    """Those of the last batch that the weights have learned from, {} before the first; null if they
    are not known."""
    ref_logprobs_from_workers: bool = False
    """Groups that come without ref_logprobs get them from reference workers (POST /reference/lease)
    before they are handed out. Needs `model`: by it workers are told from those of another one."""
    reference: (
        Annotated[dict[ShortName, SafeInt | Number | bool | Name | None], Field(max_length=64)]
        | None
    ) = None
    """How they are to be computed, for the workers to compare with. If it names a `model`, theirs
    is compared with that one."""

    log_dir: Name | None = None
    """Folder of the trainer's figures, for the page of a service on the same machine; null if it
    does not say."""
    inference_servers: Annotated[list[Name], Field(max_length=MAX_SERVERS)] | None = None
    """Addresses of the servers that sample for it, for the page to ask how they are; null if it
    does not say."""
    replay: WantedReplay | None = None
    """Null for fifo and each group once. Anything else needs max_staleness, by which old groups are
    dropped; groups that are used again are one version older at least."""

    @model_validator(mode="after")
    def _replayed_groups_age(self) -> Self:
        replay = self.replay or WantedReplay()
        if replay.policy != "fifo" and self.max_staleness is None:
            raise ValueError(
                f"replay {replay.policy!r} needs max_staleness: nothing else drops the groups that it passes over"
            )
        if replay.max_reuse > 1 and not self.max_staleness:
            raise ValueError(
                f"max_reuse {replay.max_reuse} needs max_staleness, at least 1: a group that was learned from is of older "
                "weights than the trainer has afterwards"
            )
        return self

    @model_validator(mode="after")
    def _workers_know_the_model(self) -> Self:
        if self.ref_logprobs_from_workers and self.model is None:
            raise ValueError(
                "ref_logprobs_from_workers needs model, which tells reference workers whose logprobs are meant"
            )
        return self


class AskEpoch(Request):
    """POST /weight-epoch."""

    asked: Version = 0
    """Unix milliseconds, and more than the epochs that the trainer knows of its run. The answer is
    at least as high."""
    run: RunName | None = None
    """As in POST /register: what is sampled with the epoch before the trainer registers counts as
    this run's."""


def _or_default(weight: float) -> float:
    if weight < 0 and weight != -1:
        raise ValueError("a weight is at least 0, or -1 for the default")
    return 1.0 if weight == -1 else weight


class RegisterEnv(Request):
    """POST /register-env."""

    max_token_length: SafeInt
    desired_name: Annotated[str, Field(max_length=256)]
    weight: Annotated[FiniteFloat, AfterValidator(_or_default), Field(le=1e9)]
    """Share of the trainer's data relative to the other environments' weights. -1, which stock
    environments send when they have none, is the default, 1."""
    group_size: Size
    min_batch_allocation: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    """Fraction of every batch that is kept for this environment."""
    stream: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Names the stream of items that it serves, if it can be resumed exactly: it numbers them, and
    GET /status-env tells it where the stream stands. It takes the place of an environment that
    served the same stream before."""


class EnvIdentifier(Request):
    """POST /disconnect-env."""

    env_id: SafeInt


class EnvStatus(EnvIdentifier):
    """GET /status-env."""

    moves: SafeInt | None = None
    """What it said the last time, from whoever wants to be answered when the trainer has done
    something since."""
    wait: Annotated[FiniteFloat, Field(ge=0, le=30)] = 0.0
    """Seconds until it is answered nevertheless."""
    process: Annotated[str, Field(max_length=256)] = ""
    """Names the environment's process for people, and for a supervisor: for instance its id and
    host."""


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
    """What was learned is not saved yet: keep the batch for the trainer that registers next, until
    it is acknowledged again."""
    report: Any = None
    """What the trainer computed for tokens of the batch, kept for whoever reads rollouts; see
    `ui.rollouts.report`. One that cannot be read is no reason to refuse the acknowledgement."""


class BatchReport(Request):
    """POST /batch/report: of a batch that ends the trainer's run, and so is not acknowledged."""

    batch_id: SafeInt
    uuid: SafeInt | None = None
    """What /register answered; a trainer that was superseded is told so."""
    report: Any = None
    """As in an acknowledgement."""
    error: Reason | None = None
    """The error that training on the batch raised; null if something else ends the run. See
    `run_state.BatchFailures`."""


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
    """Of those weights; null if that is not known, 0 for those that no trainer made, or where the
    server does not say."""
    metrics: Annotated[dict[MetricName, Number], Field(min_length=1, max_length=256)]
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
    since: Time | None = None
    """When it came to stand so, in Unix seconds."""
    reason: Annotated[str, AfterValidator(lambda reason: reason[:MAX_SERVER_REASON])] = ""
    """Why it is not good; its beginning is kept."""


def _each_once(servers: list[PublishedServer]) -> list[PublishedServer]:
    seen: set[str] = set()
    for server in servers:
        if server.url in seen:
            raise ValueError(f"{server.url} is listed twice; list each server once")
        seen.add(server.url)
    return servers


class PublishedFleet(Request):
    """POST /fleet."""

    servers: Annotated[
        list[PublishedServer], Field(max_length=MAX_SERVERS), AfterValidator(_each_once)
    ]
    uuid: SafeInt | None = None
    """What /register answered; a trainer that was superseded is told so, and its table is not
    taken."""
    by: Annotated[str, Field(max_length=256)] = ""
    """Which of several publishers says it, such as a parameter server; empty for the trainer."""


class LeaseReferences(Request):
    """POST /reference/lease."""

    worker: WorkerName
    """The worker's own name."""
    model: Name
    """Whose logprobs it computes: as the trainer named it when it registered."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_LEASED_TOKENS)]
    """Of all sequences of all groups. A group that has more comes alone."""
    seconds: Annotated[FiniteFloat, Field(gt=0, le=86400)]
    """After which the groups go to another worker."""


class AnsweredReference(Request):
    """The reference logprobs of one group, or why there are none."""

    id: Version
    """As it came with the group."""
    ref_logprobs: NumberRows | None = None
    """[n][length]: aligned with the group's tokens; where the mask is -100, as in
    inference_logprobs, 1.0."""
    unusable: Name | None = None
    """Why there can be none for this group: it goes on to the trainer without."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.ref_logprobs is None) == (self.unusable is None):
            raise ValueError(
                "a group has either ref_logprobs, or says in unusable why there can be none"
            )
        return self


class ReferencesDone(Request):
    """POST /reference/done."""

    worker: WorkerName
    groups: Annotated[list[AnsweredReference], Field(fail_fast=True)]
