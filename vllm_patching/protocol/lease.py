"""Who may write the weights that a paused server holds, without I/O.

A lease is out from the moment at which the engine stands still for a writer until the writer is
done: it has given the lease back, has handed it in with its commit, or is known to have ended.
While one is out nobody can say that the weights are whole, whatever their checksum is just then; so
the server serves nothing, and grants no other. The deadline of a lease ends the writer's right to
write, and not the lease: a writer that was stopped between its look at the clock and its write does
not know that it is late.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from vllm_patching.protocol.writers import Writer


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
