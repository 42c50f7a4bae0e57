"""Messages between trainer, server and workers.

- Bodies of the /bridge routes. Unknown keys are refused.
- Methods that a server calls in each worker. The server's side names a method as
  `BridgeWorker.lockstep_check`, so that mypy checks the call; the worker's side is checked where it
  is defined. Arguments and answers are plain values, since they cross between processes.
- The comparison of checksums, by the server's front end and by vLLM's engine core.
- The processes that may write a single copy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NotRequired, Protocol, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator

logger = logging.getLogger("vllm.lockstep.bridge")


class Route(StrEnum):
    """The way of the weights of a broadcast. The sender chooses it, since it knows where both ends
    keep their weights.
    """

    NCCL = "nccl"
    """From GPU to GPU. Not between two processes on one GPU: NCCL does not connect them."""
    CUDA_IPC = "cuda_ipc"
    """From GPU to GPU, some pair of them on one: the receivers that see the sender's GPU read its
    memory there."""
    GLOO = "gloo"
    """Through the host's memory, since one end keeps its weights there."""


LARGEST = 2**53 - 1
"""Largest epoch or version: every JSON reader keeps such integers exactly, and 64 bits hold
them."""
Epoch = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


T = TypeVar("T")
Listed = Annotated[T, Strict(False)]
"""A tuple, which JSON has as a list. Its entries are strict all the same."""


class Message(BaseModel):
    """A request's body.

    It refuses unknown keys, and texts with half a surrogate pair, which no answer could repeat.
    Types are strict: neither `true` nor "5" is a number.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _whole_texts(cls, value: Any) -> Any:
        _check_texts(value)
        return value


def _check_texts(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{value[:80]!r} holds half a surrogate pair, which is not text: send whole characters"
            ) from None
    elif isinstance(value, dict):
        _check_texts([*value.keys(), *value.values()])
    elif isinstance(value, list) and {str, list, dict} & set(
        map(type, value)
    ):  # a prompt has many numbers and no text
        for item in value:
            _check_texts(item)


class WriterBody(Message):
    """One process of the trainer."""

    host: str = Field(min_length=1)
    pid: int = Field(gt=0, le=LARGEST)
    started: int = Field(
        ge=0, le=LARGEST, description="clock ticks from the machine's start to the process's"
    )


class InitBody(Message):
    """POST /bridge/init: a trainer joins, and an epoch begins."""

    trainer: str = Field(min_length=1, description="who joins, for messages: host and process id")
    mode: str = Field(pattern="^(broadcast|single_copy)$")
    transfer: str = Field(default="auto", pattern="^(auto|direct|overlapped)$")
    parameters: dict[str, Listed[tuple[Listed[tuple[int, ...]], str]]] = Field(
        description="name -> (full shape, dtype) of the trainer"
    )
    weight_epoch: int = Field(
        default=0,
        ge=0,
        le=LARGEST,
        description="weight epoch of the trainer",
    )
    events: list[str] = Field(
        default=[], description="single copy on a GPU: for each rank, the event behind the writes"
    )
    writers: list[WriterBody] = Field(
        min_length=1, max_length=4096, description="every process of the trainer"
    )
    kernels: dict[str, str] | None = Field(
        default=None, description="operation -> kernel of a trainer in deterministic mode"
    )


class CohortBody(Message):
    """POST /bridge/cohort: the workers leave the lanes that they are in, and meet a cohort."""

    epoch: Epoch
    host: str = Field(default="", description="where the trainer's store is")
    port: int = Field(default=0, ge=0, lt=65536)
    secret: str = Field(
        default="", max_length=200, repr=False, description="which that store requires"
    )
    key: str = Field(
        default="",
        max_length=200,
        description="prefix of the cohort in that store; no other cohort has it",
    )
    members: int = Field(
        ge=0, le=65536, description="receivers in each lane, of all servers; 0: only leave"
    )
    index: int = Field(
        default=0, ge=0, le=65536, description="of this server's first replica among them"
    )
    lanes: int = Field(default=1, ge=1, le=1024, description="communicators for each rank")
    route: Route = Field(default=Route.GLOO, strict=False, description="how the weights travel")


class BeginBody(Message):
    """POST /bridge/begin: an update begins."""

    epoch: Epoch
    version: int = Field(ge=0, le=LARGEST)
    cohort: str = Field(
        default="",
        max_length=200,
        description="key of the cohort that sends; none for a single copy",
    )


class CommitBody(Message):
    """POST /bridge/commit: everything has been sent or written; verify it and serve it."""

    epoch: Epoch
    version: int = Field(ge=0, le=LARGEST)
    checksums: list[str] = Field(description="the trainer's, by vLLM rank")
    lease: str | None = Field(
        default=None, description="the lease's id, as /bridge/begin answered it"
    )


class AbortBody(Message):
    """POST /bridge/abort: the trainer gives an update up, and its lease back."""

    epoch: Epoch
    reason: str
    lease: str | None = Field(
        default=None, description="the lease that is given back; none if none was received"
    )


class QuarantineBody(Message):
    """POST /bridge/quarantine: the server must not serve before a full update."""

    epoch: Epoch
    reason: str = Field(min_length=1)


class RankAnswer(TypedDict):
    """The part of an answer that names its rank.

    Attributes:
        tp_rank: number of the tensor-parallel rank.
        replica: number of its engine core; the caller adds it.
    """

    tp_rank: int
    replica: NotRequired[int]


class Setup(TypedDict):
    """A rank's weights.

    Attributes:
        manifest: see Manifest.to_json.
        handles: of the shared storage; None: it is not shared.
        gpu_uuid: empty on a CPU.
        checksum: of the weights.
        recomputes: a check brings tensors that vLLM derives from the weights up to date, so that
            each update needs one before the engine goes on.
    """

    manifest: dict[str, Any]
    handles: Any
    gpu_uuid: str
    checksum: str
    replica: NotRequired[int]
    recomputes: NotRequired[bool]


class Room(TypedDict):
    """Bytes that a staging buffer needs, and bytes free for one (None on a CPU)."""

    needed: int
    free: int | None


class FirstStepAnswer(RankAnswer):
    """The moment of a rank's first step with new weights (time.monotonic()); None: not yet."""

    began: float | None


class Check(RankAnswer):
    """A check of a rank's weights.

    Attributes:
        not_finite: the first parameter that holds NaN or infinity; empty if there is none.
        late: why the weights were not checked in time.
        parameters: checksum of all parameters, if vLLM has reloaded them from the weights.
    """

    checksum: str
    not_finite: str
    late: NotRequired[str]
    parameters: NotRequired[str]


class CacheAnswer(RankAnswer):
    """Bytes of keys and values, or why the call failed."""

    bytes: int
    error: str


class LoraSetup(TypedDict):
    """A rank's base model and its places for adapters.

    Attributes:
        dtype: of adapters.
        slots, capacity: adapters in use at the same time, and in memory.
    """

    manifest: dict[str, Any]
    checksum: str
    dtype: str
    max_rank: int
    slots: int
    capacity: int


class LoraLoad(TypedDict):
    """Seconds for each phase of loading an adapter, and why it failed; empty if it did not."""

    error: str
    checksum: str
    seconds: dict[str, float]


class CohortOrder(TypedDict):
    """A rank's order to meet a cohort.

    Attributes:
        host, port, secret: see Meeting.
        key: names this forming of the cohorts.
        members: receivers of each cohort: replicas of every server; 0: only leave.
        index: of the first of this server's replicas among them.
        lanes: senders to each rank, at most.
        route: how the weights travel (see Route).
        epoch: see CohortPlace.
        timeout: seconds for forming, and for a whole transfer.
    """

    host: str
    port: int
    secret: str
    key: str
    members: int
    index: int
    lanes: int
    route: str
    epoch: int
    timeout: float


class BridgeWorker(Protocol):
    """A rank that receives weights: vLLM's worker, or a process that holds weights for others."""

    def lockstep_setup(self, share_storage: bool) -> Setup:
        """Open the weights and start the updater thread."""

    def lockstep_room(self) -> Room:
        """Return the room for a staging buffer."""

    def lockstep_aim(self, direct: bool) -> None:
        """Choose where transfers go."""

    def lockstep_cohort(self, order: CohortOrder) -> None:
        """Leave the cohort and, if there are members, join another."""

    def lockstep_leave(self) -> None:
        """Leave the trainer, and free the staging buffer."""

    def lockstep_receive(self, version: int) -> None:
        """Begin to receive."""

    def lockstep_status(self, patience: float) -> dict[str, Any]:
        """Return the status of the updater thread."""

    def lockstep_commit(self) -> Check:
        """Copy the staged weights into the live ones, and check them."""

    def lockstep_first_step(self) -> FirstStepAnswer:
        """Return when the first step with new weights began."""

    def lockstep_discard(self, patience: float) -> bool:
        """Forget what was received. Return whether the transfer has ended."""

    def lockstep_follow(self, events: list[str], trainer: str, seconds: float) -> str:
        """Have checks wait for a trainer's writes. Return why that is impossible, or nothing."""

    def lockstep_check_written(self) -> Check:
        """Check the weights behind the writes of the trainer that is followed."""

    def lockstep_check(self) -> Check:
        """Check the live weights."""


class TurnsWorker(Protocol):
    """A rank that shares its GPU with the trainer."""

    def lockstep_cache_bytes(self) -> CacheAnswer:
        """Find the memory of keys and values."""

    def lockstep_give_back(self) -> CacheAnswer:
        """Free it."""

    def lockstep_take_again(self) -> CacheAnswer:
        """Allocate it again."""


class DeterministicWorker(Protocol):
    """A rank of a server in deterministic mode."""

    def lockstep_deterministic_check(self) -> dict[str, Any]:
        """Test the operations on this machine and on this model's shapes."""


class LoraWorker(Protocol):
    """A rank that serves LoRA adapters."""

    def lora_setup(self) -> LoraSetup:
        """Describe the base model and the places for adapters."""

    def lora_load(self, folder: str, adapter_id: int, checksum: str | None) -> LoraLoad:
        """Load an adapter, all or nothing."""

    def lora_remove(self, adapter_ids: list[int]) -> list[int]:
        """Remove adapters. Return the ids of the adapters that stay."""


VERIFY_AND_RESUME = "lockstep_verify_and_resume"
CAN_VERIFY_AND_RESUME = "lockstep_can_verify_and_resume"
"""Methods that engine_core adds to vLLM's engine core."""


OCCUPIED = 423
"""HTTP status for a trainer that may join later: another one's update, lease or turn is not over."""


class BridgeRefusal(RuntimeError):
    """An answer other than success: the HTTP status, and one sentence with the reason and the
    remedy.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def rank_name(answer: Mapping[str, Any]) -> str:
    """Return the rank of an answer, for messages. The first replica is not named."""
    replica = answer.get("replica", 0)
    return (
        f"rank {answer['tp_rank']} of replica {replica}" if replica else f"rank {answer['tp_rank']}"
    )


def compare(
    answers: Sequence[Mapping[str, Any]], expected: Sequence[str], version: int, what: str
) -> None:
    """Refuse weights that differ from the trainer's, or that are not finite.

    Args:
        answers: of each rank: `tp_rank`, `checksum` and `not_finite`; `late` where the writes that
            it had to wait for did not come in time.
        expected: the trainer's checksums, by rank.
        version, what: for messages: which weights, and what the rank does with them.

    Raises:
        BridgeRefusal: names the rank and both checksums, or the parameter.
    """
    reloaded: dict[int, str] = {}
    for answer in answers:
        rank, who = answer["tp_rank"], rank_name(answer)
        if answer.get("late"):
            raise BridgeRefusal(504, f"{who} does not have version {version}: {answer['late']}")
        if answer["not_finite"]:
            raise BridgeRefusal(
                422,
                f"{who} refuses version {version}: {answer['not_finite']} holds NaN or infinity",
            )
        if answer["checksum"] != expected[rank]:
            raise BridgeRefusal(
                502,
                f"{who} {what} checksum {answer['checksum']} of version {version}, the trainer's is {expected[rank]}",
            )
        parameters = answer.get("parameters", "")
        if reloaded.setdefault(rank, parameters) != parameters:
            raise BridgeRefusal(
                502,
                f"{who} has reloaded version {version} to other parameters ({parameters}) than the "
                f"same rank of replica 0 ({reloaded[rank]})",
            )


_PROC = Path("/proc")
_START_TIME = 19
"""Place of the start time among the fields of /proc/PID/stat that follow the command's name."""


@dataclass(frozen=True)
class Writer:
    """One process.

    Attributes:
        host: name of its machine.
        pid: its process id there.
        started: clock ticks from the machine's start to its own, which distinguish it from a later
            process of the same id.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Writer:
        return cls(str(data["host"]), int(data["pid"]), int(data["started"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

    def is_here(self) -> bool:
        """Return whether this process sees that one, and so will see it end."""
        return self.host == os.uname().nodename and _start_time(self.pid) == self.started

    def has_ended(self) -> bool:
        """Return whether a process that was seen here has ended, with all its threads.

        The first thread of a killed process may be a zombie while others still run. With the last
        of them the memory and the GPU contexts of the process go, and what they had enqueued.
        """
        try:
            started = _start_time(self.pid)
            if started is None:
                return (_PROC / "self/stat").exists()  # and not the whole of /proc is gone
            if started != self.started:
                return True
            return _is_dead(_PROC / f"{self.pid}/stat") and all(
                map(_is_dead, _PROC.glob(f"{self.pid}/task/*/stat"))
            )
        except OSError as error:  # such as too many open files
            logger.warning("whether process %s has ended cannot be looked up: %s", self, error)
            return False


def this_process() -> Writer:
    """Return this process, as messages name it."""
    return process_here(os.getpid())


def process_here(pid: int) -> Writer:
    """A process of this machine; `started` is 0 if it has ended."""
    return Writer(os.uname().nodename, pid, _start_time(pid) or 0)


def _fields(stat: Path) -> list[str]:
    """Return the fields after the command's name, which may contain any character; none without
    such process.
    """
    try:
        return stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _start_time(pid: int) -> int | None:
    fields = _fields(_PROC / f"{pid}/stat")
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else None


def _is_dead(stat: Path) -> bool:
    fields = _fields(stat)
    return not fields or fields[0] in "ZX"
