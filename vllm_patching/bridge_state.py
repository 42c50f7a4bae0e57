"""The weight bridge's state machine, without I/O.

    serving v ──prepare──▶ prepared ──pause──▶ paused ──▶ transferred ──▶ committed ──▶ verified ──resume──▶ serving v+1
                               │                  │            │              │
                               └── failed before anything was written ──▶ serving v        └── failed after ──▶ unhealthy

With an overlapped transfer the weights arrive beside the old ones while the server goes on, so `transferred` comes before
`paused`. `unhealthy` means that the live weights may be a mixture, or are not the trainer's; it ends when a later update has
been verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    SERVING = "serving"
    PREPARED = "prepared"
    PAUSED = "paused"
    TRANSFERRED = "transferred"
    COMMITTED = "committed"
    VERIFIED = "verified"
    UNHEALTHY = "unhealthy"


class BridgeConflict(RuntimeError):
    """A step was asked for that does not follow from the present state; the message says which would."""


_FOLLOWS: dict[Phase, tuple[Phase, ...]] = {
    Phase.PREPARED: (Phase.SERVING, Phase.UNHEALTHY),
    Phase.PAUSED: (Phase.PREPARED,),
    Phase.TRANSFERRED: (Phase.PAUSED,),
    Phase.COMMITTED: (Phase.TRANSFERRED,),
    Phase.VERIFIED: (Phase.COMMITTED,),
    Phase.SERVING: (Phase.VERIFIED,),
}
_FOLLOWS_OVERLAPPED = {
    **_FOLLOWS,
    Phase.TRANSFERRED: (Phase.PREPARED,),
    Phase.PAUSED: (Phase.TRANSFERRED,),
    Phase.COMMITTED: (Phase.PAUSED,),
}

IN_UPDATE = (Phase.PREPARED, Phase.PAUSED, Phase.TRANSFERRED, Phase.COMMITTED, Phase.VERIFIED)


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
        transfer: how a broadcast arrives: `direct` (into the live weights, paused) or `overlapped` (beside them, then copied);
            empty for a single copy.
        checksums: per rank, of the weights that the server serves.
        last_error: why the last update failed; empty after one that succeeded.
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
    last_error: str = ""
    updates: int = 0
    failures: int = 0
    last_update: dict[str, float] = field(default_factory=dict)
    last_bytes: int = 0
    _tainted: bool = False

    @property
    def in_update(self) -> bool:
        return self.phase in IN_UPDATE

    @property
    def healthy(self) -> bool:
        return self.phase is not Phase.UNHEALTHY

    def begin_epoch(self, trainer: str, mode: str, transfer: str = "") -> int:
        """A trainer joins; the one before it, if any, is out.

        Raises:
            BridgeConflict: an update is in progress.
        """
        if self.in_update:
            raise BridgeConflict(
                f"{trainer} cannot join now: {self.trainer} (epoch {self.epoch}) is in phase {self.phase} of the update to "
                f"version {self.target_version}; wait until it has ended or timed out"
            )
        self.epoch += 1
        self.trainer, self.mode, self.transfer = trainer, mode, transfer
        # A new trainer may start from an older checkpoint than the last one reached, so its first version may be lower.
        self._first_of_epoch = True
        return self.epoch

    def check_epoch(self, epoch: int) -> None:
        """Raise BridgeConflict unless `epoch` is the present trainer's."""
        if epoch != self.epoch:
            raise BridgeConflict(
                f"epoch {epoch} is over: {self.trainer or 'no trainer'} holds epoch {self.epoch}; "
                "a trainer that was superseded must stop"
            )

    def check(self, epoch: int, version: int, before: Phase) -> None:
        """Raise BridgeConflict unless the step to `before` for this epoch and version may be taken now."""
        self.check_epoch(epoch)
        allowed = (_FOLLOWS_OVERLAPPED if self.transfer == "overlapped" else _FOLLOWS)[before]
        if self.phase not in allowed:
            expected = " or ".join(allowed)
            reason = f" (the last update failed: {self.last_error})" if self.last_error else ""
            raise BridgeConflict(f"cannot go to {before} from {self.phase}, only from {expected}{reason}")
        if before is Phase.PREPARED:
            if not self._first_of_epoch and version <= self.weight_version:
                raise BridgeConflict(f"version {version} is not newer than version {self.weight_version}, which is served")
        elif version != self.target_version:
            raise BridgeConflict(f"version {version} is not the one that was prepared ({self.target_version})")

    def advance(self, phase: Phase, version: int) -> None:
        """Take a step that `check` allowed."""
        if phase is Phase.PREPARED:
            self._tainted = self.phase is Phase.UNHEALTHY
            self.target_version = version
        elif phase is Phase.SERVING:
            self.weight_version, self.target_version = version, None
            self._tainted, self._first_of_epoch = False, False
            self.last_error = ""
            self.updates += 1
        self.phase = phase

    def fail(self, reason: str, weights_intact: bool) -> None:
        """End the update without success.

        Args:
            reason: one sentence for whoever asks.
            weights_intact: the live weights are those that were served before the update began.
        """
        self.last_error = reason
        self.target_version = None
        self.failures += 1
        self.phase = Phase.SERVING if weights_intact and not self._tainted else Phase.UNHEALTHY

    def await_weights(self, reason: str) -> None:
        """Serve nothing until a trainer has sent its weights: those at hand are not the ones that it trains."""
        self.last_error = reason
        self.phase = Phase.UNHEALTHY

    def to_json(self) -> dict[str, Any]:
        return {
            "state": str(self.phase),
            "healthy": self.healthy,
            "weight_version": self.weight_version,
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
        }

    _first_of_epoch: bool = True
