"""Records and errors of the rollout service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

NOBODY = -1
"""The line of groups that name no environment, or one that never registered here."""
QUEUED, BUFFERED, REFERENCE = 0, -1, -2
"""Place of a group: its line, its environment's buffer, or the queue for reference logprobs. A number
above 0 is the id of its batch."""
MISSING, FINAL, COMPUTED = 0, 1, 2
"""State of a group's ref_logprobs: missing; final (posted with it, or none can be computed); computed
by a reference worker."""

MAX_POSITIONS = 4096
"""Streams whose positions a trainer may name."""
MAX_SERVERS = 4096
"""Servers in each list of a fleet, since one answer carries the whole list."""
Policy = Literal["fifo", "recent", "uniform"]
"""Order in which the groups of a line are used; see `scheduling.in_order_of_use`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the queue.

    A post beyond them is refused with 429, unless the trainer would otherwise run dry.
    """

    max_groups: int = 20_000
    """Groups held: queued, buffered and leased."""
    max_bytes: int = 4 << 30
    """Bytes of JSON held."""
    silent_after: float = 60.0
    """Seconds without a call after which an environment no longer counts. No batch waits for its
    reserved share, and the other environments share its weight and its groups to sample."""
    max_keys: int = 65_536
    """Idempotency keys that the queue remembers. It forgets the oldest first."""


@dataclass(frozen=True, slots=True)
class ValidatedGroup:
    """A validated group that has not been accepted yet."""

    body: bytes
    """The JSON object to hand out."""
    size: int
    """Sequences."""
    longest: int
    """Tokens of the longest sequence."""
    env_id: int | None = None
    weights: tuple[tuple[int | None, int], ...] = ()
    """The weights that its sequences were sampled under, as (epoch, version), each once. The epoch
    is None if the environment states the version alone. Empty if it states neither."""
    key: str | None = None
    """Idempotency key."""
    tokens: int = 0
    """Tokens of all its sequences."""
    referenced: bool = True
    """It holds ref_logprobs. If not, its body ends with a null in their place."""
    stream: str | None = None
    """The stream of items that it belongs to, if its environment can be resumed exactly; see
    `run_state.Streams`."""
    item: int | None = None
    """The number of its item in the stream."""
    life: str | None = None
    """`Streams.life` when the environment began the item."""
    unknown: tuple[str, ...] = ()
    """Fields that the wire does not have."""


@dataclass(slots=True)
class Group:
    """An accepted group without its body, which only the store holds."""

    seq: int
    """Order of acceptance."""
    line: int
    """The environment in whose line it waits; `NOBODY` if it has none."""
    size: int
    longest: int
    n_bytes: int
    weights: tuple[tuple[int, int], ...]
    """The weights that its sequences were sampled under, as (epoch, version), each once. At least
    one."""
    stated: bool = False
    """The environment stated the weights. If not, they are the trainer's when the group arrived."""
    version: int = 0
    """Version of its oldest weights, as the present trainer counts versions. The queue keeps it up
    to date."""
    tokens: int = 0
    """Tokens of all its sequences."""
    reference: int = FINAL
    """MISSING, FINAL or COMPUTED."""
    uses: int = 0
    """Batches with it that a trainer has learned from."""
    place: int = QUEUED
    """QUEUED, BUFFERED or REFERENCE; above 0, the id of its batch."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to one posted group."""

    status: str
    """received, buffered or dropped."""
    buffer_size: int | None = None
    """Sequences that wait in the environment's buffer; None unless buffered."""
    reason: str | None = None
    """Why the group was dropped."""


@dataclass(slots=True)
class Environment:
    """One registered environment, and its accounts with the scheduler."""

    env_id: int
    wandb_name: str
    desired_name: str
    weight: float
    group_size: int
    max_token_length: int
    min_batch_allocation: float | None = None
    connected: bool = True
    clock: float = 0.0
    """Fair-queueing clock: sequences handed out divided by weight."""
    owed: float = 0.0
    """Sequences of its reserved share that earlier batches lacked, since they hold whole groups."""
    accepted: int = 0
    """Groups accepted from it."""
    stream: str | None = None
    """The stream of items that it serves, if it can be resumed exactly."""


@dataclass(slots=True)
class Lease:
    """A batch handed to a trainer and not yet acknowledged."""

    batch_id: int
    groups: list[Group]
    sent: bool = False
    """The trainer has the whole answer."""
    returned: bool = False
    """A later registration ended this lease; the batch waits to be handed out again."""
    sending: int = 0
    """Answers that carry it and are on their way now."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation's result."""

    id: int
    """Order of arrival, from 1. No id is used twice, not after a reset either."""
    time: float
    """Time of arrival, in Unix seconds."""
    env_id: int | None
    """The environment's; None if it is not registered."""
    name: str
    """The environment's, or the evaluation's."""
    weight_version: int | None
    """Version of the oldest weights in the evaluation; None if the client states none."""
    metrics: dict[str, float]
    key: str | None = None
    """Chosen by the client; the same key again is the same evaluation."""
    weight_epoch: int | None = None
    """Epoch of these weights, which names the trainer process that made them. A resumed trainer
    counts versions again from its checkpoint's."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as GET /evaluations answers it."""
        names = ("id", "time", "env_id", "name", "weight_version", "weight_epoch", "metrics")
        return {name: getattr(self, name) for name in names}

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return len(orjson.dumps(self.to_json()))


def length_bucket(tokens: int) -> int:
    """Return the smallest power of two that is at least `tokens`: the bucket of a dropped length."""
    return 1 << max(0, tokens - 1).bit_length()


class QueueError(Exception):
    """A request that the queue refuses. The message is meant for the client."""


class QueueFullError(QueueError):
    """The queue is at its bound."""


class RegistryFullError(QueueError):
    """The number of registered environments or of open streams is at its bound."""


class BatchTooSmallError(QueueError):
    """A group holds more sequences than a batch."""

    def __init__(self, index: int, size: int, batch_size: int) -> None:
        super().__init__(
            f"the group has {size} sequences but the trainer's batch_size is {batch_size}, so it "
            "could never be handed out. Lower the environment's group_size or raise the "
            "trainer's batch_size"
        )
        self.index = index
        """Position in the posted list."""
        self.size = size


class NotRegisteredError(QueueError):
    """No trainer has registered."""


class UnknownEnvironmentError(QueueError):
    """The environment id is not registered here."""

    def __init__(self, env_id: int) -> None:
        super().__init__(
            f"environment {env_id} is not registered here; POST /register-env to get an id"
        )


class OtherModelError(QueueError):
    """A reference worker computes the logprobs of another model than the trainer's."""

    def __init__(self, worker: str, model: str, trained: str | None) -> None:
        super().__init__(
            f"reference worker {worker!r} has the model {model!r}, but the trainer's reference is {trained!r}: "
            "start it with that"
        )


class OlderWorkerError(QueueError):
    """A reference worker does not know what the trainer's reference needs.

    Args:
        needs: entries of the trainer's `reference`.
        without: what the worker computes with in their place.
    """

    def __init__(self, worker: str, needs: Mapping[str, Any], without: Mapping[str, Any]) -> None:
        theirs, its = (
            ", ".join(f"{name} {said[name]}" for name in needs) for said in (needs, without)
        )
        super().__init__(
            f"the trainer's reference has {theirs}. Reference worker {worker!r} is of an older version, "
            f"and computes with {its}, which has other bits: start it from the trainer's version"
        )


class UnknownBatchError(QueueError):
    """The batch id was never handed out."""


class SupersededError(QueueError):
    """Another trainer has registered after the caller."""
