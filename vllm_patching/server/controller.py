"""Carries the bridge's state machine out against a running engine.

Lives in the server's API process, one per server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm_patching.compat.outputs import has_requests
from vllm_patching.protocol.lease import LeaseLost
from vllm_patching.protocol.messages import Route
from vllm_patching.protocol.verification import BridgeRefusal, compare
from vllm_patching.protocol.workers import BridgeWorker, Check
from vllm_patching.protocol.writers import Writer
from vllm_patching.server import config_file as bridge_config
from vllm_patching.server.bridge import Bridge
from vllm_patching.server.ranks import require_fitting, require_one_each
from vllm_patching.server.state import BridgeConflict, UpdateGivenUp
from vllm_patching.server.version_spans import Weights

logger = logging.getLogger("vllm.lockstep.bridge")

LATE = 410
"""HTTP status for a trainer that comes too late, which may do the update anew."""
_EVENT_MARGIN_SECONDS = 2.0
"""How much earlier than everything else a worker's wait for a trainer's writes ends, so that its
answer is in time."""


class BridgeController(Bridge):
    """One method for each arrow of the state machine, each with a deadline and an answer for
    failure.
    """

    async def init(
        self,
        trainer: str,
        mode: str,
        parameters: dict[str, tuple[tuple[int, ...], str]],
        writers: Sequence[Writer],
        transfer: str = "auto",
        events: Sequence[str] = (),
        weight_epoch: int = 0,
    ) -> dict[str, Any]:
        """A trainer joins: compare the layouts, and begin an epoch.

        Args:
            parameters: name -> (full shape, dtype) of the trainer's.
            writers: the trainer's processes, all of which can write a single copy.
            transfer: auto, direct or overlapped; auto overlaps where there is room for a staging
                buffer.
            events: handles of CUDA events, one for each rank, that a trainer of a single copy
                records behind its writes.
            weight_epoch: of the weights that the trainer sends (see version_spans.Weights).

        Returns:
            instance, epoch, transfer, weight_version, replicas, and follows_writes: checks wait for
            the events.
        """
        async with self._lock:
            require_fitting(self._manifests, parameters, self._model)
            if mode == "single_copy" and self._replicas > 1:
                raise BridgeRefusal(
                    409,
                    f"this server has {self._replicas} replicas, and a single copy is the memory of one: broadcast",
                )
            if events:
                require_one_each("event", len(events), len(self._manifests))
            await self.turns.require_over(writers)
            if not self.state.in_update:  # else begin_epoch refuses
                await self._settlement.require_no_writer(self.timeout)
            chosen = await self._ranks.choose_transfer(transfer) if mode == "broadcast" else ""
            epoch = self._or_conflict(
                lambda: self.state.begin_epoch(trainer, mode, chosen, weight_epoch)
            )
            follows_writes = await self._follow(writers, events)
            try:
                self._write_config()
            except bridge_config.ConfigFileError as error:
                raise BridgeRefusal(507, str(error)) from error
            way = ", ".join(filter(None, (mode, chosen)))
            logger.info("[Bridge] %s joins as epoch %d (%s)", trainer, epoch, way)
            return {
                "instance": self.instance,
                "epoch": epoch,
                "transfer": chosen,
                "weight_version": self.state.weight_version,
                "replicas": self._replicas,
                "follows_writes": follows_writes,
            }

    async def _follow(self, writers: Sequence[Writer], events: Sequence[str]) -> bool:
        """Prepare for the trainer that has joined. Return whether checks wait for its events."""
        self._cohort = ""
        # A process that could not be seen at first (in another container, say) has not ended if it
        # cannot be seen.
        self._writers = tuple(writers)
        self._unseen = tuple(writer for writer in writers if not writer.is_here())
        self._watchdog.follow([writer for writer in writers if writer not in self._unseen])
        followed: list[str] = []
        if self.state.mode == "broadcast":
            direct = self.state.transfer == "direct"
            await self._ranks.call(BridgeWorker.lockstep_aim, direct)
        else:
            await self._ranks.call(BridgeWorker.lockstep_leave)
            followed = list(events)
        limit = max(self.timeout / 2, self.timeout - _EVENT_MARGIN_SECONDS)
        refusals = await self._ranks.call(
            BridgeWorker.lockstep_follow, followed, self.state.trainer, limit
        )
        return bool(events) and not any(refusals)

    async def cohort(
        self,
        epoch: int,
        members: int,
        host: str = "",
        port: int = 0,
        secret: str = "",
        key: str = "",
        index: int = 0,
        lanes: int = 1,
        route: Route = Route.GLOO,
    ) -> dict[str, Any]:
        """Have the workers' updater threads leave the lanes that they are in, and meet others at
        the trainer's store. Returns at once: `begin` waits for them, and their phases stand in the
        status.

        Args:
            members: receivers in each lane, of all servers; 0: only leave.
            host, port, secret: the trainer's store.
            key: the cohort's prefix in it.
            index: of this server's first replica among the members.
            lanes: communicators for each rank.
            route: how the weights travel in them.
        """
        with self._call_off(epoch, "the trainer forms another cohort"):
            async with self._lock:
                self._or_conflict(lambda: self.state.check_epoch(epoch))
                self._require_place(members, index)
                self._cohort = ""
                await self._ranks.call(
                    BridgeWorker.lockstep_cohort,
                    host,
                    port,
                    secret,
                    key,
                    members,
                    index,
                    lanes,
                    str(route),
                    epoch,
                    self.timeout,
                )
                if members:
                    self._cohort = key
                await self._ranks.statuses()
                return {"epoch": epoch, "cohort": self._cohort, "ranks": self._ranks.last_seen}

    def _require_place(self, members: int, index: int) -> None:
        """Raise BridgeRefusal unless this server can take its places in a cohort now."""
        now = ""
        if self.state.in_update:
            now = f"in an update to version {self.state.target_version}"
        elif self.state.mode != "broadcast":
            now = "no broadcast's"
        if now:
            raise BridgeRefusal(
                409, f"no cohort can be formed: this server is {now}; abort that, or join as one"
            )
        if members and index + self._replicas > members:
            raise BridgeRefusal(
                422,
                f"members {index} to {index + self._replicas - 1} of a cohort of {members}: there is no such place",
            )

    async def begin(self, epoch: int, version: int, cohort: str = "") -> dict[str, Any]:
        """An update begins. Overlapped: the ranks receive beside the live weights. Otherwise the
        engine stops between two steps, and a lease is granted: to the trainer, which may write a
        single copy then; or to the workers' updater threads, which begin to receive (direct).

        Args:
            cohort: key of the one in which every rank must be, for a broadcast.

        Returns:
            state; lease: `id` and `deadline` (time.monotonic() of this machine, seconds), None if
            overlapped.
        """
        async with self._lock:
            self._or_conflict(lambda: self.state.check_begin(epoch, version))
            if self._watchdog.has_ended or self.engine_trouble():
                raise BridgeRefusal(503, self.trouble())
            if cohort != self._cohort or (self.state.mode == "broadcast" and not cohort):
                raise BridgeRefusal(
                    409,
                    f"version {version} is to come in cohort {cohort!r}, this server is in {self._cohort!r}",
                )
            if cohort:
                await self._until(
                    "ready", f"cohort {cohort}, for version {version}", also=("received",)
                )
            await self._settlement.require_no_writer(self.timeout)
            self._clock.begin()
            self.state.begin(version)
            try:
                if self.state.transfer == "overlapped":
                    await self._ranks.call(BridgeWorker.lockstep_receive, version)
                    return {"state": self.state.phase, "lease": None}
                await self._pause_engine()
                deadline = self._clock.deadline
                if self.state.transfer == "direct":
                    lease = self._leases.grant(
                        epoch, version, "the workers' updater threads", deadline
                    )
                    await self._ranks.call(BridgeWorker.lockstep_receive, version)
                else:
                    lease = self._leases.grant(
                        epoch, version, self.state.trainer, deadline, self._writers, self._unseen
                    )
            except BridgeRefusal as refusal:
                await self._settlement.give_up(str(refusal))
                raise
            return {"state": self.state.phase, "lease": lease.to_json()}

    async def commit(
        self, epoch: int, version: int, checksums: list[str], lease: str | None = None
    ) -> dict[str, Any]:
        """Make the transferred weights the live ones on every rank, prove that they are what the
        trainer sent, and serve them.

        Args:
            checksums: per rank, what the trainer computed from its own tensors.
            lease: the id that /bridge/begin answered. It is handed in: its holder has nothing more
                to write, but for what lies before the events that it shares.
        """
        async with self._lock:
            arrived: Sequence[Mapping[str, Any]]
            resumed_at = None
            self._or_conflict(lambda: self.state.check_epoch(epoch))
            overlapped = self.state.transfer == "overlapped"
            if not overlapped:
                self._or_conflict(lambda: self._leases.require(lease, time.monotonic()))
            self._or_conflict(lambda: self.state.check_commit(epoch, version))
            require_one_each("checksum", len(checksums), len(self._manifests))
            try:
                if self.state.mode == "broadcast":
                    arrived = await self._until("received", f"transfer of version {version}")
                else:
                    arrived, resumed_at = await self._checked(
                        BridgeWorker.lockstep_check_written, checksums, version
                    )
                if not any(answer.get("late") for answer in arrived):
                    self._leases.end()
                self._clock.reach("transferred")
                compare(arrived, checksums, version, "received")
                if overlapped:
                    await self._pause_engine()
                    arrived, resumed_at = await self._checked(
                        BridgeWorker.lockstep_commit, checksums, version
                    )
                self._clock.reach("committed")
                compare(arrived, checksums, version, "holds after the commit")
                self._clock.reach("verified")
                return await self._serve(epoch, version, checksums, resumed_at)
            except BridgeRefusal as refusal:
                if self.state.in_update:
                    await self._settlement.give_up(str(refusal))
                raise

    async def abort(self, epoch: int, reason: str, lease: str | None = None) -> dict[str, Any]:
        """The trainer gives the update up, and its lease back.

        Args:
            lease: the id that it was answered; None if it never was, so that it has written
                nothing. Either way its word is that nothing of it is on the way to the weights any
                more.
        """
        told = f"the trainer gave up: {reason}"
        with self._call_off(epoch, told):
            async with self._lock:
                if not self._leases.give_back(epoch, lease):
                    self._or_conflict(lambda: self.state.check_epoch(epoch))
                if self.state.in_update and epoch == self.state.epoch:
                    await self._settlement.give_up(told)
                else:
                    await self._settlement.look_again()
                return self.status()

    async def quarantine(self, epoch: int, reason: str) -> dict[str, Any]:
        """The trainer does not want this server to serve before a full update: nothing is answered
        from now on, an update in progress ends, and the engine stands still.
        """
        self._or_conflict(lambda: self.state.check_epoch(epoch))
        self.state.put_in_quarantine(reason)
        with self._calling_off.by(f"quarantine: {reason}"):
            async with self._lock:
                # What had the lock may have been the end of an update, or the next trainer that
                # joins.
                self.state.put_in_quarantine(reason)
                logger.warning("[Bridge] In quarantine: %s", reason)
                if self.state.in_update:
                    await self._settlement.give_up(f"quarantine: {reason}")
                else:
                    await self._settlement.stand_still()
                return self.status()

    # -- what the arrows are made of

    def _call_off(self, epoch: int, reason: str) -> AbstractContextManager[None]:
        """Break off waits in the block, for the trainer of this epoch alone."""
        if epoch != self.state.epoch:
            return nullcontext()
        return self._calling_off.by(reason)

    async def _pause_engine(self) -> None:
        self._switch.hold_outputs(self.timeout)
        await self._switch.pause()
        self._clock.reach("paused")

    async def _checked(
        self, method: Callable[[Any], Check], checksums: list[str], version: int
    ) -> tuple[list[Check], float | None]:
        """Each rank's answer to a check, and when the engine went on: None if it was not given what
        it expected.
        """
        if self._switch.resting:  # it goes on at the end of the trainer's turn
            return await self._ranks.call(method), None
        weights = Weights(self.state.next_weight_epoch, version)
        self._switch.hold_outputs(2 * self.timeout)
        self._switch.lose_track()
        answers, resumed_at, runs = await self._ranks.verify_and_resume(
            method, checksums, version, lambda moment: self._spans.switch_at(moment, weights)
        )
        self._switch.note(runs)
        return answers, resumed_at

    async def _serve(
        self, epoch: int, version: int, checksums: list[str], resumed_at: float | None
    ) -> dict[str, Any]:
        """
        Args:
            resumed_at: when the engine went on by itself; it may stand still again.
        """
        begun = resumed_at
        if begun is None:
            begun = time.monotonic()
        self._spans.switch_at(begun, Weights(self.state.next_weight_epoch, version))
        self._or_conflict(
            lambda: self.state.check_commit(epoch, version)
        )  # it may have been put in quarantine meanwhile
        in_flight = has_requests(self._engine) and not self._switch.resting
        await self._switch.resume()
        self._or_conflict(lambda: self.state.check_commit(epoch, version))
        self._clock.reach("serving")
        self.state.serve(list(checksums))
        self._clock.resumed(begun, in_flight)
        self.state.last_update = self._clock.seconds
        self.timeline.updated(self._clock.began, version)
        self.state.last_bytes = self._rank_bytes if self.state.mode == "broadcast" else 0
        logger.info(
            "[Bridge] Serving weight version %d (epoch %d, %s)",
            version,
            self.state.epoch,
            self._clock,
        )
        return {
            "state": self.state.phase,
            "weight_version": version,
            "seconds": dict(self._clock.seconds),
        }

    async def _until(
        self, wanted: str, what: str, also: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        waiting = f"waiting for {self.state.trainer}"
        return await self._ranks.until(
            wanted,
            what,
            waiting,
            also,
            may_block=self._switch.paused,
            called_off=lambda: self._calling_off.reason,
        )

    def _or_conflict(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (UpdateGivenUp, LeaseLost) as late:
            raise BridgeRefusal(LATE, str(late)) from late
        except BridgeConflict as conflict:
            raise BridgeRefusal(409, str(conflict)) from conflict
