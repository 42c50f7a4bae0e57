"""Bodies of requests as pydantic models, and the refusal of a body that does not validate: it names the
field and the value.

`group_reader` reads posted groups, which are long.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from atroposlib.service.records import MAX_POSITIONS, MAX_SERVERS, Policy
from atroposlib.web.addresses import MAX_ADDRESS_LENGTH, server_address
from atroposlib.wire import LARGEST_FLOAT32, MAX_SESSIONS, Key, SafeInt, StrictNumbers, Version

MAX_REASON = 300
"""Characters of the reason for setting a batch aside."""
MAX_SERVER_REASON = 4096
"""Characters that are kept of a server's reason. A longer reason does not refuse the table."""
LARGEST_BATCH = 1 << 20
"""Sequences. The work of packing a batch grows with its size."""
MAX_LEASED_TOKENS = 1 << 22
"""Tokens that one request of a reference worker may lease, since the worker reads the answer as a
whole."""
NEW_ENTRIES: dict[str, Any] = {"parts": 1}
"""Entries of a registration's `reference` that older reference workers ignore, and what these compute
with."""
MAX_UNIX_SECONDS = 253402300799.0
"""The end of the year 9999, the last year of a date."""

EpochAndStep = Annotated[list[Version], Field(min_length=2, max_length=2)]
Reason = Annotated[str, AfterValidator(lambda reason: " ".join(reason.split())[:MAX_REASON])]
"""One line for the log, cut off at MAX_REASON."""
RunName = Annotated[str, Field(min_length=1, max_length=256)]
Size = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
Name = Annotated[str, Field(max_length=4096)]
ShortName = Annotated[str, Field(max_length=64)]
WorkerName = Annotated[str, Field(min_length=1, max_length=256)]
MetricName = Annotated[str, Field(min_length=1, max_length=256)]
ServerUrl = Annotated[str, Field(max_length=MAX_ADDRESS_LENGTH), AfterValidator(server_address)]
"""http://host:port, or https."""
Number = Annotated[FiniteFloat, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]
"""A number that stays finite in float32, in which TensorBoard and most loggers keep it."""
NumberRows = Annotated[list[Annotated[list[Number], Field(fail_fast=True)]], Field(fail_fast=True)]
Time = Annotated[FiniteFloat, Field(ge=0, le=MAX_UNIX_SECONDS)]

ModelT = TypeVar("ModelT", bound=BaseModel)


class InvalidRequestError(ValueError):
    """The body does not validate. `errors` is the list of the 422 answer."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(error["msg"] for error in errors))
        self.errors = errors

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)  # a child process raises it, too


def invalid(where: list[str | int], value: Any, message: str) -> InvalidRequestError:
    """Return an error with one entry: the path of a field, its value, and the reason."""
    return InvalidRequestError(
        [{"type": "value_error", "loc": ["body", *where], "msg": message, "input": value}]
    )


def path(where: list[str | int] | tuple[str | int, ...]) -> str:
    """Return the path for people, such as `tokens[0][3]`."""
    return (
        "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
        or "the body"
    )


def short(value: Any) -> Any:
    """Return a value for an error: short, and without NaN, which JSON does not have."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if (
        isinstance(value, int) and abs(value) >= 10**40
    ):  # Python refuses to print integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int | float) and not abs(value) < 2**53:
        return str(value)[:64]
    if isinstance(value, str) and len(value) > 200:
        return value[:200] + "…"
    return value


def refused(error: ValidationError) -> InvalidRequestError:
    """Return the first twenty of pydantic's errors, for a 422 answer."""
    errors = []
    for item in error.errors(include_url=False, include_context=False)[:20]:
        where = list(item["loc"])
        message, value = item["msg"].removeprefix("Value error, "), None
        if item["type"] not in ("missing", "json_invalid"):  # their input is the whole body
            value = short(item["input"])
            if item["type"] == "float_type" and type(item["input"]) is int:
                # No float can hold the integer.
                message = f"Input should be less than or equal to {LARGEST_FLOAT32:g} in magnitude"
            if where or item["type"] != "value_error":  # of several fields, which it names
                message = f"{path(where)} is {value!r}: {message}"
        errors.append(
            {"type": item["type"], "loc": ["body", *where], "msg": message, "input": value}
        )
    return InvalidRequestError(errors)


def read(model: type[ModelT], body: bytes) -> ModelT:
    """Read a small request.

    Raises:
        InvalidRequestError: the body is not JSON, or does not validate.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise refused(error) from None


class Request(StrictNumbers):
    """A body. Unknown keys are ignored, and clients may rely on that."""

    model_config = ConfigDict(extra="ignore")


class ReplayOptions(Request):
    """Order in which groups are used, and number of uses."""

    policy: Policy = "fifo"
    """fifo: oldest first. recent: newest weights first. uniform: at random among all waiting groups."""
    max_reuse: Annotated[int, Field(ge=1, le=1024)] = 1
    """Batches with a group that the trainer may learn from."""
    seed: Version = 0
    """Seed of the policy uniform."""


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
    """The trainer sends POST /batch/ack from the first batch on. If false, the service learns of
    acknowledgements from the first one."""
    model: Name | None = None
    """The trained model. It and checkpoint_dir name the run if `run` does not; null if neither
    does."""
    weight_epoch: Version = 0
    """The answer of POST /weight-epoch, which names this trainer process; 0 without one."""
    run: RunName | None = None
    """Names the run, over all its resumes. Null if model and checkpoint_dir name it."""
    lives: Annotated[list[EpochAndStep], Field(max_length=MAX_SESSIONS)] | None = None
    """[weight epoch, starting step] of each trainer of the run, this one last, as its checkpoints
    name them."""
    positions: Annotated[dict[Name, Version], Field(max_length=MAX_POSITIONS)] | None = None
    """The first item of each stream after the last batch that the weights have learned from. It is
    {} before the first batch, and null if the trainer does not keep them.
    """
    ref_logprobs_from_workers: bool = False
    """Groups without ref_logprobs get them from reference workers (POST /reference/lease) before they
    are handed out. Requires `model`; workers that loaded a different model are refused."""
    reference: (
        Annotated[dict[ShortName, SafeInt | Number | bool | Name | None], Field(max_length=64)]
        | None
    ) = None
    """Instructions for the workers. If it names a `model`, the workers must have that model."""

    log_dir: Name | None = None
    """Folder of the trainer's figures, for the page of a service on the same machine."""
    inference_servers: Annotated[list[Name], Field(max_length=MAX_SERVERS)] | None = None
    """Addresses of the servers that sample for it. The page shows their states."""
    replay: ReplayOptions | None = None
    """Null for fifo and each group once. Other options require max_staleness, which drops old groups.
    A group in its second use is at least one version older."""

    @model_validator(mode="after")
    def _replayed_groups_age(self) -> Self:
        replay = self.replay or ReplayOptions()
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
                "ref_logprobs_from_workers needs model, so that reference workers score with the "
                "right one"
            )
        return self


class Registration(RegisterTrainer):
    """A registered trainer, with the service's count as its `weight_epoch`."""

    uuid: int

    def not_followed(self, follows: Collection[str]) -> dict[str, Any]:
        """Return the entries of `reference` that change the result, and that a worker which follows
        these does not know.
        """
        return {
            name: value
            for name, plain in NEW_ENTRIES.items()
            if (value := (self.reference or {}).get(name, plain)) not in (plain, None)
            and name not in follows
        }

    @property
    def reference_model(self) -> str | None:
        """The model whose logprobs the reference workers compute."""
        model = (self.reference or {}).get("model")
        return model if isinstance(model, str) else self.model

    def is_another_run(self, other: Registration) -> bool:
        """Return True if the two are of different runs.

        If one of them names no run, these are different models, or one model in different folders.
        """
        if self.run is not None and other.run is not None:
            return self.run != other.run
        if self.model is None or other.model is None:
            return False
        return (self.model, self.checkpoint_dir) != (other.model, other.checkpoint_dir)


class EpochRequest(Request):
    """POST /weight-epoch."""

    asked: Version = 0
    """Unix milliseconds, above all epochs in the trainer's checkpoints. The answer is at least as
    high."""
    run: RunName | None = None
    """As in POST /register. Groups sampled with the epoch before the trainer registers count as this
    run's."""


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
    environments send by default, means 1."""
    group_size: Size
    min_batch_allocation: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    """Fraction of every batch that is kept for this environment."""
    stream: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Names the environment's stream of items, if it can be resumed exactly. It numbers the items, and
    GET /status-env returns the position. It replaces an earlier environment of the same stream."""


class EnvIdentifier(Request):
    """POST /disconnect-env."""

    env_id: SafeInt


class EnvStatus(EnvIdentifier):
    """GET /status-env."""

    moves: SafeInt | None = None
    """`moves` of the last answer. The service answers once the trainer has acted since."""
    wait: Annotated[FiniteFloat, Field(ge=0, le=30)] = 0.0
    """Seconds after which the service answers in any case."""
    process: Annotated[str, Field(max_length=256)] = ""
    """Names the environment's process for people and for a supervisor, such as its id and host."""
    trouble: Reason = ""
    """Why the environment posts no groups, for people; empty if it does."""


class AckBatch(Request):
    """POST /batch/ack."""

    batch_id: SafeInt | None = None
    """The batch's id; null for all batches that the trainer holds."""
    weight_version: Version | None = None
    """Optimizer steps of the trainer's weights now; null counts each batch as one step."""
    uuid: SafeInt | None = None
    """The answer of /register. A superseded trainer gets 409."""
    skipped: Name | None = None
    """Reason why the trainer could not learn from the batch; null if it did."""
    keep: bool = False
    """The trainer has not saved its weights yet. Keep the batch for the trainer that registers next,
    until it is acknowledged again."""
    report: Any = None
    """The trainer's figures for tokens of the batch, for people who read rollouts; see
    `dashboard.rollouts`. A malformed report does not refuse the acknowledgement."""


class BatchReport(Request):
    """POST /batch/report, for a batch that ends the trainer's run and so is not acknowledged."""

    batch_id: SafeInt
    uuid: SafeInt | None = None
    """The answer of /register. A superseded trainer gets 409."""
    report: Any = None
    """As in an acknowledgement."""
    error: Reason | None = None
    """The error of training on the batch; null if something else ends the run. See
    `run_state.BatchFailures`."""


class EndRun(Request):
    """POST /run/end."""

    uuid: SafeInt
    """The answer of /register."""


class PostedEvaluation(Request):
    """POST /evaluations."""

    env_id: SafeInt | None = None
    """The answer of /register-env; null if the environment is not registered."""
    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The environment's, or the evaluation's."""
    weight_version: Version | None = None
    """Version of the oldest weights in the evaluation; null if it is unknown."""
    weight_epoch: Version | None = None
    """Epoch of these weights; null if it is unknown, 0 for weights of no trainer or if the server
    states none."""
    metrics: Annotated[dict[MetricName, Number], Field(min_length=1, max_length=256)]
    idempotency_key: Key | None = None
    """Chosen by the client. A repeated key gets the same answer, and the result counts once."""


class ServerAddress(Request):
    """POST /fleet/join and POST /fleet/leave."""

    url: ServerUrl


class PublishedServer(Request):
    """One inference server in the trainer's table."""

    url: ServerUrl
    standing: Literal["joining", "good", "quarantined", "away"]
    weight_version: SafeInt | None = None
    """Version of the weights that it serves; null if it is unknown."""
    weight_epoch: SafeInt | None = None
    since: Time | None = None
    """Time of its last change of standing, in Unix seconds."""
    reason: Annotated[str, AfterValidator(lambda reason: reason[:MAX_SERVER_REASON])] = ""
    """Reason for a standing other than good, cut off at MAX_SERVER_REASON."""


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
    """The answer of /register. A superseded trainer gets 409, and its table is not kept."""
    by: Annotated[str, Field(max_length=256)] = ""
    """The publisher, such as a parameter server; empty for the trainer."""


class LeaseReferences(Request):
    """POST /reference/lease."""

    worker: WorkerName
    """The worker's own name."""
    model: Name
    """The model whose logprobs it computes, under the name in the trainer's registration."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_LEASED_TOKENS)]
    """Tokens of all sequences of all groups. A group that has more comes alone."""
    seconds: Annotated[FiniteFloat, Field(gt=0, le=86400)]
    """Seconds after which the groups go to another worker."""
    follows: list[ShortName] = Field(default=[], max_length=64)
    """Entries of the registration's `reference` that the worker takes over. Workers without the list
    know none of NEW_ENTRIES."""


class AnsweredReference(Request):
    """The reference logprobs of one group, or the reason for none."""

    id: Version
    """The group's id from the lease."""
    ref_logprobs: NumberRows | None = None
    """[n][length], aligned with the group's tokens. Where the mask is -100 it is 1.0, as in
    inference_logprobs."""
    unusable: Name | None = None
    """Reason why the group can have none. It goes to the trainer without."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.ref_logprobs is None) == (self.unusable is None):
            raise ValueError(
                "a group has either ref_logprobs, or in unusable the reason why there can be none"
            )
        return self


class ReferencesDone(Request):
    """POST /reference/done."""

    worker: WorkerName
    groups: Annotated[list[AnsweredReference], Field(fail_fast=True)]
