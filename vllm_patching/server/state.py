"""The weights of one server, without I/O. It has the state machine of updates, the lease of the
writer, and the weights that each token of a running request was sampled with.

    serving v ──begin──▶ updating ──commit──▶ serving v+1
                            │
                            ├── failed, and the weights are proven to be v's ──▶ serving v
                            └── failed after they were written, or not known ──▶ unhealthy ──begin──▶ updating ──▶ …

    quarantine, from anywhere ──▶ unhealthy

`unhealthy` means that the live weights may be a mixture, or are not the trainer's. Or the engine
did not continue, or the trainer has put the server in quarantine. The engine is paused then. The
state ends when a later update has been verified. While it is undecided, a process may still write
or the workers do not answer. Then it also ends when the weights prove to be whole. A quarantine
does not.

A lease is out from the moment at which the engine is paused for a writer. It is in when the writer
has given it back, has handed it in with its commit, or has ended. While it is out, the weights
cannot be proven whole, so the server serves nothing and grants no other lease. The deadline ends
the right to write, but not the lease. A writer that was stopped between its check of the clock and
its write does not notice that it is late.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from vllm_patching.protocol.messages import Writer


class LeaseLost(RuntimeError):
    """The lease of a commit is not valid. The message gives the reason."""


@dataclass(frozen=True)
class Lease:
    """The right to write one version.

    Attributes:
        id: what its holder shows.
        epoch, version: of the update that it is for.
        holder: the writer, for messages.
        deadline: until when the holder may begin to write, and commit (time.monotonic() of this
            machine, seconds).
        writers: the holder's processes; empty if the server's own workers write, in their updater
            threads.
        unseen: writers that cannot be looked up.
    """

    id: str
    epoch: int
    version: int
    holder: str
    deadline: float
    writers: tuple[Writer, ...] = ()
    unseen: tuple[Writer, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what the holder receives."""
        return {"id": self.id, "deadline": self.deadline}

    @property
    def has_ended(self) -> bool:
        """Return whether every process of the holder has ended. Asks the operating system."""
        return (
            bool(self.writers)
            and not self.unseen
            and all(writer.has_ended() for writer in self.writers)
        )

    @property
    def remedy(self) -> str:
        """Return the reason of the wait, and the remedy."""
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
        """Grant a lease. The previous one must have ended: two writers would make a mixture."""
        if self.out is not None:
            raise RuntimeError(f"a lease is out already: {self.out.remedy}")
        self.out = Lease(uuid.uuid4().hex, epoch, version, holder, deadline, writers, unseen)
        return self.out

    def require(self, shown: str | None, now: float) -> Lease:
        """Return the lease that is out, if `shown` is its id and its deadline has not passed.

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
                "Nothing may be written under it any more; give it back, and begin the update again"
            )
        return lease

    def give_back(self, epoch: int, shown: str | None) -> bool:
        """Take the lease back: its holder has no writes in flight and will write nothing more.

        Args:
            epoch: the holder's.
            shown: the lease's id; None from a holder that never received it, and so never wrote
                under it.

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
        """End the lease: its writer has handed it in, has stopped writing, or has ended."""
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

    An update happens while the engine is paused, so tokens that left the engine before that moment
    belong to the old weights. They may reach their requests much later on a busy server. So a
    switch waits for the first output that left the engine after that moment, and counts then.

    One moment suffices for all replicas of a server. All confirm the pause before the first one
    continues, and a replica sends its tokens before it confirms. So tokens of the old weights come
    before tokens of the new ones.
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
        """Return the version with which tokens are counted now."""
        return self.weights.version

    def start(self, request_id: str) -> None:
        """Note a request that goes to the engine next."""
        self._switches[request_id] = []

    def known(self, request_id: str) -> None:
        """The engine's front end knows the request: from now on it is among those counted, until it
        has ended.
        """
        if request_id in self._switches:
            self._known.add(request_id)

    def switch_at(self, moment: float, new: Weights) -> None:
        """Count outputs that leave the engine after `moment` (time.monotonic, seconds) to the
        weights `new`.
        """
        self._pending.append((moment, new))
        if not self._switches:
            self.outputs_of(moment, dict)

    def outputs_of(self, moment: float, tokens_so_far: Callable[[], Mapping[str, int]]) -> None:
        """Apply the switches that are due for outputs that left the engine at `moment`.

        Args:
            tokens_so_far: counts the output tokens of every request that has not ended; asked only
                if a switch is due.
        """
        while self._pending and self._pending[0][0] <= moment:
            _, new = self._pending.pop(0)
            self.switch(new, tokens_so_far())

    def switch(self, new: Weights, tokens_so_far: Mapping[str, int]) -> None:
        """Change the weights to `new`. `tokens_so_far` counts the output tokens of every running
        request.
        """
        old, self.weights = self.weights, new
        for request_id, switches in self._switches.items():
            if request_id in tokens_so_far:
                switches.append((old, tokens_so_far[request_id]))
            elif request_id in self._known:
                switches.append(
                    (old, None)
                )  # it has ended, and its result is not fetched yet: all of it is old

    def finish(self, request_id: str, num_tokens: int) -> list[Span]:
        """Return the spans of a finished request in the order of serving. Their lengths add up to
        `num_tokens`.
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
        """Drop a request that ended without a result."""
        self._known.discard(request_id)
        self._switches.pop(request_id, None)


class Phase(StrEnum):
    SERVING = "serving"
    UPDATING = "updating"
    UNHEALTHY = "unhealthy"


class BridgeConflict(RuntimeError):
    """A step does not follow from the present state. The message names the step that would."""


class Occupied(BridgeConflict):
    """Another trainer's update is in progress. A trainer may join after it."""


class UpdateGivenUp(BridgeConflict):
    """The step belongs to an update that was given up and may be repeated."""


@dataclass
class BridgeState:
    """Where one server's bridge is.

    Attributes:
        phase: the present state.
        weight_version: the version that the server serves (or served last, when unhealthy).
        target_version: the version being installed; None outside an update.
        epoch: how many trainers have joined since the server started.
        trainer: names the present trainer, for messages; empty before the first.
        mode: `broadcast` or `single_copy`; empty before the first trainer.
        transfer: how a broadcast arrives: `direct` (into the live weights, paused) or `overlapped`
            (beside them, then copied); empty for a single copy.
        checksums: per rank, of the weights that the server serves.
        parameters: per rank, of all parameters that vLLM has reloaded from these weights; empty
            where the weights are the parameters.
        weight_epoch: of the weights that the server serves: the life of the trainer that made them
            (Unix milliseconds of its start); 0 for the checkpoint's.
        last_error: why the last update failed; empty after one that succeeded.
        quarantine: the trainer's reason for a quarantine, which lasts until a full update; empty
            without one.
        undecided: the open fact that decides whether the weights are whole; empty if that is
            decided.
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
    parameters: list[str] = field(default_factory=list)
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
        """Return whether requests may be accepted.

        An update that mends unhealthy weights must be served before that.
        """
        return self.phase is not Phase.UNHEALTHY and not self._mending and not self.quarantine

    @property
    def awaits_weights(self) -> bool:
        """Return whether the present weights must not be served though they are whole."""
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
            Occupied: an update is in progress.
        """
        self.check_join(trainer)
        self.epoch += 1
        self.trainer, self.mode, self.transfer = trainer, mode, transfer
        self._trainer_weight_epoch = weight_epoch
        # A new trainer may start from an older checkpoint than the last one reached, so its first
        # version may be lower.
        self._first_of_epoch = True
        self.gave_up_waiting = None
        return self.epoch

    def check_join(self, trainer: str) -> None:
        """Raise Occupied unless `trainer` may join now."""
        if self.in_update:
            raise Occupied(
                f"{trainer} cannot join now: {self.trainer} (epoch {self.epoch}) is in an update to "
                f"version {self.target_version}; wait until it has ended or timed out"
            )

    def check_epoch(self, epoch: int) -> None:
        """Raise BridgeConflict unless `epoch` is the present trainer's."""
        if not self.epoch:
            raise BridgeConflict(
                f"no trainer has joined this server, so there is no epoch {epoch}: "
                "join with POST /bridge/init first"
            )
        if epoch != self.epoch:
            raise BridgeConflict(
                f"epoch {epoch} is over: {self.trainer} holds epoch {self.epoch}; "
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
        """Raise BridgeConflict unless the present update is this one; UpdateGivenUp if it was given
        up and may be repeated at once.
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
            raise BridgeConflict(f"version {version} was not begun, but {self.target_version}")

    def begin(self, version: int) -> None:
        """Begin an update that `check_begin` allowed."""
        self.target_version, self._mending = version, self.phase is Phase.UNHEALTHY
        self._ends_in_quarantine = False
        self.gave_up_waiting = None
        self.phase = Phase.UPDATING

    def serve(self, checksums: list[str]) -> None:
        """Serve the update's verified weights."""
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
            reason: one sentence for messages.
            weights_intact: the live weights are proven to be `weight_version`, and no process may
                write them.
            undecided: the open fact that decides it later (`decide`).
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
        """Decide what was undecided. Arguments: see `fail`."""
        self.undecided = ""
        if self.phase is Phase.UNHEALTHY and weights_intact and not self.awaits_weights:
            self.phase = Phase.SERVING

    def fall_back(self, version: int, weight_epoch: int, checksums: list[str]) -> None:
        """Serve an older version, whole and verified, since the last one is lost."""
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
            "parameters": list(self.parameters),
            "updates": self.updates,
            "failures": self.failures,
            "last_update": dict(self.last_update),
            "last_bytes": self.last_bytes,
            "last_error": self.last_error,
            "quarantine": self.quarantine,
            "undecided": self.undecided,
            "gave_up_waiting": self.gave_up_waiting,
        }
