"""What a trainer sends to a server's /bridge routes. Unknown keys are refused."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Route(StrEnum):
    """How the weights of a broadcast travel.

    Whoever sends chooses, since it knows where both ends keep theirs.
    """

    NCCL = "nccl"
    """From GPU to GPU. Not between two processes on one GPU: NCCL does not connect them."""
    CUDA_IPC = "cuda_ipc"
    """From GPU to GPU, some pair of them on one: the receivers that see the sender's GPU read its
    memory there."""
    GLOO = "gloo"
    """Through the host's memory, since one end keeps its weights there."""


LARGEST = 2**53 - 1
"""Of epochs and versions: every JSON reader keeps such integers exactly, and 64 bits hold them."""
Epoch = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


class Message(BaseModel):
    """A request's body.

    It refuses unknown keys, and texts with half a surrogate pair, which no answer could repeat.
    """

    model_config = ConfigDict(extra="forbid")

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
    parameters: dict[str, tuple[tuple[int, ...], str]] = Field(
        description="name -> (full shape, dtype) of the trainer"
    )
    weight_epoch: int = Field(
        default=0,
        ge=0,
        le=LARGEST,
        description="life of the trainer: Unix milliseconds of its start",
    )
    events: list[str] = Field(
        default=[], description="single copy on a GPU: for each rank, the event behind the writes"
    )
    writers: list[WriterBody] = Field(
        min_length=1, max_length=4096, description="every process of the trainer"
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
    route: Route = Field(default=Route.GLOO, description="how the weights travel")


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
