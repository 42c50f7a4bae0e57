"""Carries the bridge's state machine out against a running engine. Lives in the server's API process, one per server."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_patching.compat.engine import engine_is_dead
from vllm_patching.compat.outputs import follow_outputs, has_requests, output_token_counts
from vllm_patching.compat.requests import salt_prefix_cache
from vllm_patching.protocol.lease import LeaseLost, Leases
from vllm_patching.protocol.manifest import Manifest, flat_layout
from vllm_patching.protocol.verification import BridgeRefusal, compare
from vllm_patching.protocol.writers import Writer
from vllm_patching.server import config_file as bridge_config
from vllm_patching.server.engine_switch import EngineState, EngineSwitch
from vllm_patching.server.ranks import RankCalls, require_fitting, require_one_each
from vllm_patching.server.settlement import Settlement
from vllm_patching.server.state import BridgeConflict, BridgeState, Phase, UpdateGivenUp
from vllm_patching.server.turns import Turns
from vllm_patching.server.update_clock import UpdateClock
from vllm_patching.server.version_spans import VersionSpans, Weights
from vllm_patching.server.watchdog import BridgeWatchdog

logger = logging.getLogger("vllm.lockstep.bridge")

LATE = 410
"""HTTP status for a trainer that comes too late, which may do the update anew."""
_EVENT_MARGIN_SECONDS = 2.0
"""How much earlier than everything else a worker's wait for a trainer's writes ends, so that its answer is in time."""


class BridgeController:
    """One method for each arrow of the state machine, each with a deadline and an answer for failure."""

    def __init__(
        self,
        engine: Any,
        model: str,
        dtype: str,
        timeout: float,
        config_dir: Path,
        spans: VersionSpans,
        keep_cache: bool = False,
        port: int = 0,
    ) -> None:
        """
        Args:
            engine: vLLM's AsyncLLM.
            model, dtype: as given on the command line; for messages.
            timeout: seconds for each step.
            config_dir: where vllm_bridge_config.json goes.
            spans: told of every switch of versions.
            keep_cache: let running requests keep the keys and values that older weights computed.
            port: where the server listens; its config file is known by it.
        """
        self.state = BridgeState()
        self.timeout = timeout
        self._engine = engine
        self._ranks = RankCalls(engine, timeout)
        self._switch = EngineSwitch(engine, timeout, keep_cache)
        self._leases = Leases()
        self._model, self._dtype = model, dtype
        self._config = bridge_config.ConfigFile(config_dir, port)
        self._spans = spans
        self._keep_cache = keep_cache
        self._instance = uuid.uuid4().hex
        self._manifests: list[Manifest] = []
        self._handles: list[dict[str, Any] | None] = []
        self._rank_bytes = 0
        self._lock = asyncio.Lock()
        self._clock = UpdateClock(timeout)
        self._writers = self._unseen = tuple[Writer, ...]()
        self._verified: list[str] = []
        self._settlement = Settlement(self.state, self._ranks, self._leases, self._switch)
        self.turns = Turns(self.state, self._ranks, self._switch, self._lock, lambda: (self._writers, self._unseen))
        self._watchdog = BridgeWatchdog(self.state, self._ranks, self._settlement, self._clock, self._lock, self.turns)

    async def start(self) -> None:
        """Open the workers' weights and write the config file. Raises whatever keeps the weights from being shared, or the
        file from being written (bridge_config.ConfigFileError).
        """
        await self._ranks.require_engine_core()
        setups = sorted(await self._ranks.call("lockstep_setup", True), key=lambda s: s["manifest"]["tp_rank"])
        self._manifests = [Manifest.from_json(s["manifest"]) for s in setups]
        self._ranks.count(len(setups))
        self._handles = [s["handles"] for s in setups]
        self._rank_bytes = sum(flat_layout(manifest)[1] for manifest in self._manifests)
        self.state.checksums = [s["checksum"] for s in setups]
        count = partial(output_token_counts, self._engine)
        follow_outputs(self._engine, self._spans.known, lambda moment: self._spans.outputs_of(moment, count))
        if self._keep_cache:
            # What is accepted before a pause may go on with older keys and values; what is accepted after it never sees them.
            salt_prefix_cache(self._engine, lambda: f"lockstep-{self._switch.pauses}-")
        self._config.claim()
        if self._config.awaited:
            self.state.await_weights(self._config.awaited)
            logger.warning("[Bridge] %s", self._config.awaited)
            await self._settlement.stand_still()
        self._write_config()
        self._watchdog.start()
        logger.info("[vLLM Patch] ✓ Shared memory setup complete! (%s)", self._config.path)

    async def stop(self) -> None:
        """End the watchdog and take back what was published."""
        await self._watchdog.stop()
        bridge_config.remove_shared(self._handles)
        self._config.remove()

    def info(self) -> dict[str, Any]:
        """Everything a trainer must know before it joins, but for the storage handles: only the config file has those."""
        return {
            "instance": self._instance,
            "model": self._model,
            "dtype": self._dtype,
            "tp_degree": len(self._manifests),
            "weight_version": self.state.weight_version,
            "config_path": str(self._config.path),
            "hostname": os.uname().nodename,
            "bridge_timeout": self.timeout,
            "device": self._manifests[0].entries[0].device.split(":")[0],
            "cache_bytes": self.turns.bytes,
            "gpu_uuids": [h.get("gpu_uuid", "") if h else "" for h in self._handles],
            "ranks": [m.to_json() for m in self._manifests],
        }

    def status(self) -> dict[str, Any]:
        """The state as JSON, with the `instance`, which is another one after each start of the server; what the engine does;
        and who may write the weights.
        """
        lease, trouble = self._leases.out, self.trouble()
        return {
            **self.state.to_json(),
            **self.turns.to_json(),
            "healthy": not trouble,
            "trouble": trouble,
            "instance": self._instance,
            "engine": str(self._switch.state),
            "engine_dead": engine_is_dead(self._engine),
            "lease": None if lease is None else {"holder": lease.holder, "version": lease.version},
        }

    def trouble(self) -> str:
        """Why nothing can be sampled rightly, by what the engine does; empty if it can, or will when an update has ended."""
        if self._watchdog.has_ended:
            return f"the bridge's watchdog has ended ({self._watchdog.end}), which notices lost updates; restart the server"
        if not self.state.healthy:
            waits = f" (or until this is known: {self.state.undecided})" if self.state.undecided else ""
            return f"the weights are not whole: {self.state.last_error}; a full update from a trainer heals it{waits}"
        if not (self.state.in_update or self._switch.resting) and self._switch.state is not EngineState.RUNNING:
            return f"the engine is {self._switch.state} outside an update; a full update from a trainer or a restart heals it"
        return self.turns.trouble

    async def init(
        self,
        trainer: str,
        mode: str,
        parameters: dict[str, tuple[tuple[int, ...], str]],
        master_addr: str,
        master_port: int,
        writers: Sequence[Writer],
        key: str = "",
        transfer: str = "auto",
        events: Sequence[str] = (),
        weight_epoch: int = 0,
    ) -> dict[str, Any]:
        """A trainer joins: compare the layouts, begin an epoch, and have the workers meet it.

        Args:
            parameters: name -> (full shape, dtype) of the trainer's.
            master_addr, master_port: where the trainer's store is.
            writers: the trainer's processes, all of which can write a single copy.
            key: prefix for this server in it.
            transfer: auto, direct or overlapped; auto overlaps where there is room for a staging buffer.
            events: handles of CUDA events, one for each rank, that a trainer of a single copy records behind its writes.
            weight_epoch: of the weights that the trainer sends (see version_spans.Weights).

        Returns:
            instance, epoch, key, data_backend, transfer, weight_version, and follows_writes: checks wait for the events.
        """
        async with self._lock:
            require_fitting(self._manifests, parameters, self._model)
            if events:
                require_one_each("event", len(events), len(self._manifests))
            await self.turns.require_over(writers)
            if not self.state.in_update:  # else begin_epoch refuses
                await self._settlement.require_no_writer(self.timeout)
            chosen = await self._ranks.choose_transfer(transfer) if mode == "broadcast" else ""
            epoch = self._or_conflict(lambda: self.state.begin_epoch(trainer, mode, chosen, weight_epoch))
            backend = "nccl" if self._manifests[0].entries[0].device.startswith("cuda") else "gloo"
            key = f"{key}/epoch{epoch}"
            # A process that could not be seen at first (in another container, say) has not ended if it cannot be seen.
            self._writers, self._unseen = tuple(writers), tuple(writer for writer in writers if not writer.is_here())
            self._watchdog.follow([writer for writer in writers if writer not in self._unseen])
            if mode == "broadcast":
                direct = chosen == "direct"
                await self._ranks.call("lockstep_join", master_addr, master_port, key, epoch, backend, self.timeout, direct)
            else:
                await self._ranks.call("lockstep_leave")
            followed = list(events) if mode == "single_copy" else []
            limit = max(self.timeout / 2, self.timeout - _EVENT_MARGIN_SECONDS)
            refusals = await self._ranks.call("lockstep_follow", followed, trainer, limit)
            try:
                self._write_config()
            except bridge_config.ConfigFileError as error:
                raise BridgeRefusal(507, str(error)) from error
            logger.info("[Bridge] %s joins as epoch %d (%s)", trainer, epoch, f"{mode}, {chosen}" if chosen else mode)
            return {
                "instance": self._instance,
                "epoch": epoch,
                "key": key,
                "data_backend": backend,
                "transfer": chosen,
                "weight_version": self.state.weight_version,
                "follows_writes": bool(events) and not any(refusals),
            }

    async def prepare(self, epoch: int, version: int, not_finite: str = "") -> dict[str, Any]:
        """Announce a version; every rank must have joined by then. An overlapped transfer begins.

        Args:
            not_finite: the parameter in which the trainer found NaN or infinity, if it did; then the version is refused.
        """
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.PREPARED))
            if self._watchdog.has_ended:
                raise BridgeRefusal(503, self.trouble())
            if not_finite:
                raise BridgeRefusal(
                    422, f"version {version} is refused: {not_finite} holds NaN or infinity; {self.state.weight_version} stays"
                )
            await self._settlement.require_no_writer(self.timeout)
            if self.state.mode == "broadcast":
                await self._until("ready", "prepare", version, also=("received",))
            self._enter(Phase.PREPARED, version)
            if self.state.transfer == "overlapped":
                await self._ranks.call("lockstep_receive", version)
            return {"state": self.state.phase}

    async def pause(self, epoch: int, version: int) -> dict[str, Any]:
        """Stop the engine between two steps. A trainer of a single copy may write then, under the lease that it is answered;
        for a direct transfer the workers' updater threads may, and begin to receive.

        Returns:
            state; lease: `id` and `deadline` (time.monotonic() of this machine, seconds).
        """
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.PAUSED))
            try:
                await self._pause_engine(version)
                deadline = self._clock.deadline
                if self.state.transfer == "direct":
                    lease = self._leases.grant(epoch, version, "the workers' updater threads", deadline)
                    await self._ranks.call("lockstep_receive", version)
                else:
                    lease = self._leases.grant(epoch, version, self.state.trainer, deadline, self._writers, self._unseen)
            except BridgeRefusal as refusal:
                await self._settlement.give_up(str(refusal))
                raise
            return {"state": self.state.phase, "lease": lease.to_json()}

    async def commit(
        self, epoch: int, version: int, checksums: list[str], lease: str | None = None, resume: bool = False
    ) -> dict[str, Any]:
        """Make the transferred weights the live ones on every rank, and prove that they are what the trainer sent.

        Args:
            checksums: per rank, what the trainer computed from its own tensors.
            lease: the id that /bridge/pause answered. It is handed in: its holder has nothing more to write, but for what lies
                before the events that it shares.
            resume: go on at once to serve the version.
        """
        async with self._lock:
            resumed_at = None
            self._or_conflict(lambda: self.state.check_epoch(epoch))
            overlapped = self.state.transfer == "overlapped"
            if not overlapped:
                self._or_conflict(lambda: self._leases.require(lease, time.monotonic()))
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.TRANSFERRED))
            require_one_each("checksum", len(checksums), len(self._manifests))
            try:
                if self.state.mode == "broadcast":
                    arrived = await self._until("received", "transfer", version)
                else:
                    arrived, resumed_at = await self._checked("lockstep_check_written", checksums, version, resume)
                if not any(answer.get("late") for answer in arrived):
                    self._leases.end()
                self._enter(Phase.TRANSFERRED, version)
                compare(arrived, checksums, version, "received")
                if overlapped:
                    self._or_conflict(lambda: self.state.check(epoch, version, Phase.PAUSED))
                    await self._pause_engine(version)
                    arrived, resumed_at = await self._checked("lockstep_commit", checksums, version, resume)
                self._enter(Phase.COMMITTED, version)
                compare(arrived, checksums, version, "holds after the commit")
                self._enter(Phase.VERIFIED, version)
                self._verified = list(checksums)
                if not resume:
                    return {"state": self.state.phase, "checksums": checksums}
                return await self._serve(version, resumed_at)
            except BridgeRefusal as refusal:
                if self.state.in_update:
                    await self._settlement.give_up(str(refusal))
                raise

    async def resume(self, epoch: int, version: int) -> dict[str, Any]:
        """Serve the new version."""
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.SERVING))
            try:
                return await self._serve(version, None)
            except BridgeRefusal as refusal:
                await self._settlement.give_up(str(refusal))
                raise

    async def abort(self, epoch: int, reason: str, lease: str | None = None) -> dict[str, Any]:
        """The trainer gives the update up, and its lease back.

        Args:
            lease: the id that it was answered; None if it never was, so that it has written nothing. Either way its word is
                that nothing of it is on the way to the weights any more.
        """
        async with self._lock:
            if not self._leases.give_back(epoch, lease):
                self._or_conflict(lambda: self.state.check_epoch(epoch))
            if self.state.in_update and epoch == self.state.epoch:
                await self._settlement.give_up(f"the trainer gave up: {reason}")
            else:
                await self._settlement.look_again()
            return self.status()

    # -- what the arrows are made of

    async def _pause_engine(self, version: int) -> None:
        self._switch.hold_outputs(self.timeout)
        await self._switch.pause()
        self._enter(Phase.PAUSED, version)

    async def _checked(self, method: str, checksums: list[str], version: int, resume: bool) -> tuple[list[Any], float | None]:
        """Each rank's answer to a check, and when the engine went on: None if it was not asked to, or found something else."""
        if not resume or self._switch.resting:  # a resting engine goes on at the end of the trainer's turn
            return await self._ranks.call(method), None
        weights = Weights(self.state.next_weight_epoch, version)
        self._switch.hold_outputs(2 * self.timeout)
        self._switch.lose_track()
        answers, resumed_at, runs = await self._ranks.verify_and_resume(
            method, checksums, version, lambda moment: self._spans.switch_at(moment, weights)
        )
        self._switch.note(runs)
        return answers, resumed_at

    async def _serve(self, version: int, resumed_at: float | None) -> dict[str, Any]:
        """
        Args:
            resumed_at: when the engine went on by itself; it may stand still again.
        """
        begun = time.monotonic() if resumed_at is None else resumed_at
        self._spans.switch_at(begun, Weights(self.state.next_weight_epoch, version))
        in_flight = has_requests(self._engine) and not self._switch.resting
        await self._switch.resume()
        self.state.checksums = self._verified
        self._enter(Phase.SERVING, version)
        self._clock.resumed(begun, in_flight)
        self.state.last_update = self._clock.seconds
        self.state.last_bytes = self._rank_bytes if self.state.mode == "broadcast" else 0
        logger.info("[Bridge] Serving weight version %d (epoch %d, %s)", version, self.state.epoch, self._clock)
        return {"state": self.state.phase, "weight_version": version, "seconds": dict(self._clock.seconds)}

    async def _until(self, wanted: str, phase: str, version: int, also: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        waiting = f"waiting for {self.state.trainer}"
        return await self._ranks.until(wanted, f"{phase} of version {version}", waiting, also, may_block=self._switch.paused)

    def _enter(self, phase: Phase, version: int) -> None:
        self._clock.enter(phase)
        self.state.advance(phase, version)

    def _or_conflict(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (UpdateGivenUp, LeaseLost) as late:
            raise BridgeRefusal(LATE, str(late)) from late
        except BridgeConflict as conflict:
            raise BridgeRefusal(409, str(conflict)) from conflict

    def _write_config(self) -> None:
        facts = {key: value for key, value in self.info().items() if key != "ranks"}
        facts |= {"epoch": self.state.epoch, "trainer": self.state.trainer}
        self._config.publish(facts, self._manifests, self._handles)
