"""The methods that a server calls in each of its workers: names, arguments and answers.

The server's side names a method as `BridgeWorker.lockstep_check`, so that mypy checks the call. The
worker's side is checked against these protocols where it is defined. Arguments and answers are
plain values, since they cross between processes.
"""

from __future__ import annotations

from typing import Any, NotRequired, Protocol, TypedDict


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
    """

    manifest: dict[str, Any]
    handles: Any
    gpu_uuid: str
    checksum: str
    replica: NotRequired[int]


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
    """

    checksum: str
    not_finite: str
    late: NotRequired[str]


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


class BridgeWorker(Protocol):
    """A rank that receives weights: vLLM's worker, or a process that holds weights for others."""

    def lockstep_setup(self, share_storage: bool) -> Setup:
        """Open the weights and start the updater thread."""

    def lockstep_room(self) -> Room:
        """Return the room for a staging buffer."""

    def lockstep_aim(self, direct: bool) -> None:
        """Choose where transfers go."""

    def lockstep_cohort(
        self,
        host: str,
        port: int,
        secret: str,
        key: str,
        members: int,
        index: int,
        lanes: int,
        route: str,
        epoch: int,
        timeout: float,
    ) -> None:
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
        """Remove adapters. Return the ids of those that stay."""
