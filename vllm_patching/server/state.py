"""The weight bridge's state machine, without I/O.

    serving v ──begin──▶ updating ──commit──▶ serving v+1
                            │
                            ├── failed, and the weights are proven to be v's ──▶ serving v
                            └── failed after they were written, or not known ──▶ unhealthy ──begin──▶ updating ──▶ …

    quarantine, from anywhere ──▶ unhealthy

`unhealthy` means that the live weights may be a mixture, or are not the trainer's, or that the
engine could not be told to go on, or that the trainer has put the server in quarantine; the engine
stands still then. It ends when a later update has been verified. While it is undecided, because
somebody may still write or the workers do not answer, it also ends when the weights turn out to be
whole; a quarantine does not.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from vllm_patching.protocol.messages import Writer


class LeaseLost(RuntimeError):
    """The lease that was shown is not one under which anything may be committed; the message says
    why.
    """


@dataclass(frozen=True)
class Lease:
    """The right to write one version.

    Attributes:
        id: what its holder shows.
        epoch, version: of the update that it is for.
        holder: who writes, for messages.
        deadline: until when the holder may begin to write, and commit (time.monotonic() of this
            machine, seconds).
        writers: the holder's processes; empty if the server's own workers write, in their updater
            threads.
        unseen: those of them that cannot be looked up.
    """

    id: str
    epoch: int
    version: int
    holder: str
    deadline: float
    writers: tuple[Writer, ...] = ()
    unseen: tuple[Writer, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What the holder is told."""
        return {"id": self.id, "deadline": self.deadline}

    @property
    def has_ended(self) -> bool:
        """Whether every process of the holder is known to have ended. Asks the operating system."""
        return (
            bool(self.writers)
            and not self.unseen
            and all(writer.has_ended() for writer in self.writers)
        )

    @property
    def remedy(self) -> str:
        """What is waited for, and what a person can do about it."""
        waits = f"{self.holder} may still write under its lease for version {self.version}"
        if not self.writers:
            return f"{waits}; it ends with the transfer's time limit, or restart the server"
        names = ", ".join(map(str, self.writers))
        if self.unseen:
            unseen = ", ".join(map(str, self.unseen))
            return f"{waits}; let it give that back, or end {names} and restart the server, which cannot see {unseen} end"
        return f"{waits}; let it go on, so that it gives that back, or end its process: {names}"


class Leases:
    """The lease that is out, if one is."""

    def __init__(self) -> None:
        self.out: Lease | None = None

    def grant(
        self,
        epoch: int,
        version: int,
        holder: str,
        deadline: float,
        writers: tuple[Writer, ...] = (),
        unseen: tuple[Writer, ...] = (),
    ) -> Lease:
        """A new lease. The one before it must have ended: two writers would make a mixture."""
        if self.out is not None:
            raise RuntimeError(f"a lease is out already: {self.out.remedy}")
        self.out = Lease(uuid.uuid4().hex, epoch, version, holder, deadline, writers, unseen)
        return self.out

    def require(self, shown: str | None, now: float) -> Lease:
        """The lease that is out, if it is the one shown and its deadline has not passed.

        Raises:
            LeaseLost: otherwise.
        """
        lease = self.out
        if lease is None or shown != lease.id:
            present = (
                f"{lease.holder} holds one for version {lease.version}"
                if lease
                else "no lease is out"
            )
            raise LeaseLost(
                f"the lease {shown or '(none)'} does not count (any more): {present}. Nothing may be written now"
            )
        if now > lease.deadline:
            raise LeaseLost(
                f"the lease for version {lease.version} ran out {now - lease.deadline:.1f} s ago: {lease.holder} is late. "
                "Nothing may be written under it any more; give it back, and begin the update anew"
            )
        return lease

    def give_back(self, epoch: int, shown: str | None) -> bool:
        """The holder says that nothing of it is on the way to the weights, and that it will write
        nothing more.

        Args:
            epoch: the holder's.
            shown: the lease's id; None from a holder that was never told it, and so has never
                written under it.

        Returns:
            whether that was the lease which is out; it has ended then. The workers' own lease does
            not end so.
        """
        lease = self.out
        if (
            lease is None
            or not lease.writers
            or epoch != lease.epoch
            or shown not in (None, lease.id)
        ):
            return False
        self.out = None
        return True

    def end(self) -> None:
        """The writer is done: it has handed the lease in, has let go, or is known to have ended."""
        self.out = None


class Weights(NamedTuple):
    """Names one set of weights.

    Attributes:
        epoch: the life of the trainer that made them (Unix milliseconds of its start); 0: the
            checkpoint's, before any trainer.
        version: the number of optimizer steps behind them. A trainer that resumes counts on from
            its checkpoint, so the version may go back where the epoch goes on.
    """

    epoch: int
    version: int


class Span(NamedTuple):
    """Consecutive tokens that were sampled with the same weights."""

    weights: Weights
    tokens: int


class VersionSpans:
    """Follows requests across weight updates.

    An update happens while the engine is paused, so the tokens that left the engine before a
    certain moment are those of the old weights. They may reach their requests much later, on a busy
    server; so a switch waits for the first output that left the engine after that moment, and
    counts then.

    One moment does for all replicas of a server: before the first of them goes on, all have said
    that they stand still, and what a replica sampled until then it sent before it said so. So the
    tokens of the old weights come before any of the new.
    """

    def __init__(self, version: int = 0, epoch: int = 0) -> None:
        """
        Args:
            version, epoch: of the weights that are served at first.
        """
        self.weights = Weights(epoch, version)
        self._switches: dict[str, list[tuple[Weights, int | None]]] = {}
        self._known: set[str] = set()
        self._pending: list[tuple[float, Weights]] = []

    @property
    def version(self) -> int:
        """Of the weights with which tokens are counted now."""
        return self.weights.version

    def start(self, request_id: str) -> None:
        """A request is about to be handed to the engine."""
        self._switches[request_id] = []

    def known(self, request_id: str) -> None:
        """The engine's front end knows the request: from now on it is among those counted, until it
        has ended.
        """
        if request_id in self._switches:
            self._known.add(request_id)

    def switch_at(self, moment: float, new: Weights) -> None:
        """What leaves the engine after `moment` (time.monotonic, seconds) is of the weights `new`."""
        self._pending.append((moment, new))
        if not self._switches:
            self.outputs_of(moment, dict)

    def outputs_of(self, moment: float, tokens_so_far: Callable[[], Mapping[str, int]]) -> None:
        """Outputs that left the engine at `moment` are about to be handed on.

        Args:
            tokens_so_far: counts the output tokens of every request that has not ended; asked only
                if a switch is due.
        """
        while self._pending and self._pending[0][0] <= moment:
            _, new = self._pending.pop(0)
            self.switch(new, tokens_so_far())

    def switch(self, new: Weights, tokens_so_far: Mapping[str, int]) -> None:
        """The weights change to `new`; `tokens_so_far` counts the output tokens of every running
        request.
        """
        old, self.weights = self.weights, new
        for request_id, switches in self._switches.items():
            if request_id in tokens_so_far:
                switches.append((old, tokens_so_far[request_id]))
            elif request_id in self._known:
                switches.append(
                    (old, None)
                )  # it has ended, and nobody has fetched its result yet: all of it is old

    def finish(self, request_id: str, num_tokens: int) -> list[Span]:
        """The spans of a finished request in the order in which they were served; their lengths add
        up to `num_tokens`.
        """
        spans: list[Span] = []
        covered = 0
        self._known.discard(request_id)
        for weights, until in self._switches.pop(request_id, []):
            count = num_tokens if until is None else until
            if count > covered:
                spans.append(Span(weights, count - covered))
                covered = count
        if num_tokens > covered or not spans:
            spans.append(Span(self.weights, num_tokens - covered))
        return spans

    def forget(self, request_id: str) -> None:
        """A request ended without a result."""
        self._known.discard(request_id)
        self._switches.pop(request_id, None)


class Phase(StrEnum):
    SERVING = "serving"
    UPDATING = "updating"
    UNHEALTHY = "unhealthy"


class BridgeConflict(RuntimeError):
    """A step was asked for that does not follow from the present state; the message says which
    would.
    """


class UpdateGivenUp(BridgeConflict):
    """The step belongs to an update that was given up; it may be done anew."""


@dataclass
class BridgeState:
    """Where one server's bridge is.

    Attributes:
        phase: the present state.
        weight_version: the version that the server serves (or served last, when unhealthy).
        target_version: the version being installed; None outside an update.
        epoch: how many trainers have joined since the server started.
        trainer: who the present one is, for messages; empty before the first.
        mode: `broadcast` or `single_copy`; empty before the first trainer.
        transfer: how a broadcast arrives: `direct` (into the live weights, paused) or `overlapped`
            (beside them, then copied); empty for a single copy.
        checksums: per rank, of the weights that the server serves.
        weight_epoch: of the weights that the server serves: the life of the trainer that made them
            (Unix milliseconds of its start); 0 for the checkpoint's.
        last_error: why the last update failed; empty after one that succeeded.
        quarantine: why the trainer does not want the server to serve before a full update; empty if
            it has not said so.
        undecided: what has to be known before it can be said whether the weights are whole; empty
            if it is known.
        gave_up_waiting: the version of the last update if that was given up because its trainer was
            silent; else None.
        updates: number of updates that were served.
        failures: number of updates that were given up.
        last_update: seconds by phase of the last update that was served.
        last_bytes: payload bytes that the ranks received in it.
    """

    phase: Phase = Phase.SERVING
    weight_version: int = 0
    target_version: int | None = None
    epoch: int = 0
    trainer: str = ""
    mode: str = ""
    transfer: str = ""
    checksums: list[str] = field(default_factory=list)
    weight_epoch: int = 0
    last_error: str = ""
    quarantine: str = ""
    undecided: str = ""
    gave_up_waiting: int | None = None
    updates: int = 0
    failures: int = 0
    last_update: dict[str, float] = field(default_factory=dict)
    last_bytes: int = 0
    _awaiting: bool = False
    _mending: bool = False
    _ends_in_quarantine: bool = False
    _given_up: tuple[int, int | None] = (0, None)
    _trainer_weight_epoch: int = 0
    _first_of_epoch: bool = True

    @property
    def in_update(self) -> bool:
        return self.phase is Phase.UPDATING

    @property
    def healthy(self) -> bool:
        """Whether requests may be accepted.

        An update that mends unhealthy weights must be served before that.
        """
        return self.phase is not Phase.UNHEALTHY and not self._mending and not self.quarantine

    @property
    def awaits_weights(self) -> bool:
        """Whether the weights at hand must not be served though they are whole."""
        return self._awaiting or bool(self.quarantine)

    @property
    def next_weight_epoch(self) -> int:
        """The weight epoch of what the present trainer sends."""
        return self._trainer_weight_epoch

    def begin_epoch(
        self, trainer: str, mode: str, transfer: str = "", weight_epoch: int = 0
    ) -> int:
        """A trainer joins; the one before it, if any, is out.

        Args:
            weight_epoch: of the weights that it will send.

        Raises:
            BridgeConflict: an update is in progress.
        """
        if self.in_update:
            raise BridgeConflict(
                f"{trainer} cannot join now: {self.trainer} (epoch {self.epoch}) is in an update to "
                f"version {self.target_version}; wait until it has ended or timed out"
            )
        self.epoch += 1
        self.trainer, self.mode, self.transfer = trainer, mode, transfer
        self._trainer_weight_epoch = weight_epoch
        # A new trainer may start from an older checkpoint than the last one reached, so its first
        # version may be lower.
        self._first_of_epoch = True
        self.gave_up_waiting = None
        return self.epoch

    def check_epoch(self, epoch: int) -> None:
        """Raise BridgeConflict unless `epoch` is the present trainer's."""
        if epoch != self.epoch:
            raise BridgeConflict(
                f"epoch {epoch} is over: {self.trainer or 'no trainer'} holds epoch {self.epoch}; "
                "a trainer that was superseded must stop"
            )

    def check_begin(self, epoch: int, version: int) -> None:
        """Raise BridgeConflict unless an update to `version` may begin now."""
        self.check_epoch(epoch)
        if self.in_update:
            raise BridgeConflict(
                f"an update to version {self.target_version} is in progress; commit or abort it"
            )
        served = version == self.weight_version and self.phase is Phase.SERVING
        if not self._first_of_epoch and (served or version < self.weight_version):
            raise BridgeConflict(
                f"version {version} is not newer than version {self.weight_version}, which is served"
            )

    def check_commit(self, epoch: int, version: int) -> None:
        """Raise BridgeConflict unless the present update is this one: UpdateGivenUp if it was, was
        given up, and may be done anew at once.
        """
        self.check_epoch(epoch)
        if not self.in_update:
            late = self._given_up == (epoch, version)
            reason = f" (the last update failed: {self.last_error})" if self.last_error else ""
            kind = UpdateGivenUp if late else BridgeConflict
            raise kind(
                f"version {version} cannot be committed while the server is {self.phase}, only in an update{reason}"
            )
        if self._ends_in_quarantine:
            raise BridgeConflict(
                f"version {version} cannot be served: the server is in quarantine: {self.quarantine}"
            )
        if version != self.target_version:
            raise BridgeConflict(
                f"version {version} is not the one that was begun ({self.target_version})"
            )

    def begin(self, version: int) -> None:
        """An update that `check_begin` allowed begins."""
        self.target_version, self._mending = version, self.phase is Phase.UNHEALTHY
        self._ends_in_quarantine = False
        self.gave_up_waiting = None
        self.phase = Phase.UPDATING

    def serve(self, checksums: list[str]) -> None:
        """The update's weights are verified, and the engine goes on with them."""
        assert self.target_version is not None
        assert not self._ends_in_quarantine
        self.weight_version, self.target_version = self.target_version, None
        self.weight_epoch = self._trainer_weight_epoch
        self.checksums = checksums
        self._awaiting = self._mending = self._first_of_epoch = False
        self.last_error = self.undecided = self.quarantine = ""
        self.updates += 1
        self.phase = Phase.SERVING

    def fail(
        self, reason: str, weights_intact: bool, undecided: str = "", trainer_silent: bool = False
    ) -> None:
        """End the update without success.

        Args:
            reason: one sentence for whoever asks.
            weights_intact: the live weights are proven to be those of `weight_version`, and nobody
                may write them.
            undecided: what has to be known before that can be said; it may turn out to be so
                (`decide`).
            trainer_silent: nothing but the trainer's next step was missing.
        """
        self.last_error = reason
        self.gave_up_waiting = self.target_version if trainer_silent else None
        self._given_up = (
            (0, None) if self._ends_in_quarantine else (self.epoch, self.target_version)
        )
        self.target_version, self._mending = None, False
        self.failures += 1
        whole = weights_intact and not self.awaits_weights
        self.undecided, self.phase = undecided, Phase.UNHEALTHY
        if whole:
            self.undecided, self.phase = "", Phase.SERVING

    def decide(self, weights_intact: bool) -> None:
        """What was undecided is known now. Arguments: see `fail`."""
        self.undecided = ""
        if self.phase is Phase.UNHEALTHY and weights_intact and not self.awaits_weights:
            self.phase = Phase.SERVING

    def fall_back(self, version: int, weight_epoch: int, checksums: list[str]) -> None:
        """What was served last is gone, and an older version is at hand, whole and verified: that
        is the one that is served.
        """
        self.weight_version, self.weight_epoch, self.checksums = (
            version,
            weight_epoch,
            list(checksums),
        )

    def await_weights(self, reason: str) -> None:
        """Serve nothing until a trainer has sent its weights: those at hand are not the ones that
        it trains.
        """
        self.last_error = reason
        self._awaiting = True
        self.phase = Phase.UNHEALTHY

    def put_in_quarantine(self, reason: str) -> None:
        """Serve nothing until a full update, whatever the weights are.

        An update in progress is to `fail` after it.
        """
        self.quarantine = reason
        if self.in_update:
            self._ends_in_quarantine = True
        else:
            self.last_error = reason
            self.phase = Phase.UNHEALTHY

    def to_json(self) -> dict[str, Any]:
        return {
            "state": str(self.phase),
            "healthy": self.healthy,
            "weight_version": self.weight_version,
            "weight_epoch": self.weight_epoch,
            "target_version": self.target_version,
            "epoch": self.epoch,
            "trainer": self.trainer,
            "mode": self.mode,
            "transfer": self.transfer,
            "checksums": list(self.checksums),
            "updates": self.updates,
            "failures": self.failures,
            "last_update": dict(self.last_update),
            "last_bytes": self.last_bytes,
            "last_error": self.last_error,
            "quarantine": self.quarantine,
            "undecided": self.undecided,
            "gave_up_waiting": self.gave_up_waiting,
        }
