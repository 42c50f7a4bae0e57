"""What a trainer sends to a server's /bridge routes. Unknown keys are refused."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Route(StrEnum):
    """How the weights of a broadcast travel. Whoever sends chooses, since it knows where both ends keep theirs."""

    NCCL = "nccl"
    """From GPU to GPU. Not between two processes on one GPU: NCCL does not connect them."""
    CUDA_IPC = "cuda_ipc"
    """From GPU to GPU, some pair of them on one: the receivers that see the sender's GPU read its memory there."""
    GLOO = "gloo"
    """Through the host's memory, since one end keeps its weights there."""

    @property
    def handed_on(self) -> bool:
        """Whether receivers may have their bytes from one another: one that takes none then keeps those behind it waiting."""
        return self is not Route.CUDA_IPC


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WriterBody(Message):
    """One process of the trainer."""

    host: str = Field(min_length=1)
    pid: int = Field(gt=0)
    started: int = Field(ge=0, description="clock ticks from the machine's start to the process's")


class InitBody(Message):
    """POST /bridge/init: a trainer joins, and an epoch begins."""

    trainer: str = Field(min_length=1, description="who joins, for messages: host and process id")
    mode: str = Field(pattern="^(broadcast|single_copy)$")
    transfer: str = Field(default="auto", pattern="^(auto|direct|overlapped)$")
    parameters: dict[str, tuple[tuple[int, ...], str]] = Field(description="name -> (full shape, dtype) of the trainer")
    weight_epoch: int = Field(default=0, ge=0, description="life of the trainer: Unix milliseconds of its start")
    events: list[str] = Field(default=[], description="single copy on a GPU: for each rank, the event behind the writes")
    writers: list[WriterBody] = Field(min_length=1, max_length=4096, description="every process of the trainer")


class CohortBody(Message):
    """POST /bridge/cohort: the workers leave the lanes that they are in, and meet a cohort."""

    epoch: int
    host: str = Field(default="", description="where the trainer's store is")
    port: int = Field(default=0, ge=0, lt=65536)
    key: str = Field(default="", max_length=200, description="prefix of the cohort in that store; no other cohort has it")
    members: int = Field(ge=0, le=65536, description="receivers in each lane, of all servers; 0: only leave")
    index: int = Field(default=0, ge=0, description="of this server's first replica among them")
    lanes: int = Field(default=1, ge=1, le=1024, description="communicators for each rank")
    route: Route = Field(default=Route.GLOO, description="how the weights travel")


class BeginBody(Message):
    """POST /bridge/begin: an update begins."""

    epoch: int
    version: int = Field(ge=0)
    cohort: str = Field(default="", max_length=200, description="key of the cohort that sends; none for a single copy")


class CommitBody(Message):
    """POST /bridge/commit: everything has been sent or written; verify it and serve it."""

    epoch: int
    version: int = Field(ge=0)
    checksums: list[str] = Field(description="the trainer's, by vLLM rank")
    lease: str | None = Field(default=None, description="the lease's id, as /bridge/begin answered it")


class AbortBody(Message):
    """POST /bridge/abort: the trainer gives an update up, and its lease back."""

    epoch: int
    reason: str
    lease: str | None = Field(default=None, description="the lease that is given back; none if none was received")


class QuarantineBody(Message):
    """POST /bridge/quarantine: the server must not serve before a full update."""

    epoch: int
    reason: str = Field(min_length=1)
