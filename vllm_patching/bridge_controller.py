"""Carries the bridge's state machine out against a running engine. Lives in the server's API process, one per server."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_patching import bridge_config, compat
from vllm_patching.bridge_ranks import BridgeRefusal, RankCalls, compare, require_fitting, require_one_each
from vllm_patching.bridge_state import BridgeConflict, BridgeState, Phase
from vllm_patching.manifest import Manifest, flat_layout
from vllm_patching.update_clock import UpdateClock
from vllm_patching.version_spans import VersionSpans

logger = logging.getLogger("vllm.lockstep.bridge")

_LET_GO_SECONDS = 2.0
_WATCH_SECONDS = 0.5


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
        self._outputs = compat.HeldOutputs(engine)
        self._model = model
        self._dtype = dtype
        self._config = bridge_config.ConfigFile(config_dir, port)
        self._spans = spans
        self._keep_cache = keep_cache
        self._instance = uuid.uuid4().hex
        self._manifests: list[Manifest] = []
        self._handles: list[dict[str, Any] | None] = []
        self._rank_bytes = 0
        self._lock = asyncio.Lock()
        self._clock = UpdateClock(timeout)
        self._engine_paused = False
        self._trainer_seen = False
        self._pauses = 0
        self._watch: asyncio.Task[None] | None = None

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
        compat.follow_outputs(
            self._engine,
            self._spans.known,
            lambda moment: self._spans.outputs_of(moment, lambda: compat.output_token_counts(self._engine)),
        )
        if self._keep_cache:
            # What is accepted before a pause may go on with older keys and values; what is accepted after it never sees them.
            compat.salt_prefix_cache(self._engine, lambda: f"lockstep-{self._pauses}-")
        self._config.claim()
        if self._config.awaited:
            self.state.await_weights(self._config.awaited)
            logger.warning("[Bridge] %s", self._config.awaited)
        self._write_config()
        self._watch = asyncio.create_task(self._watch_updates(), name="bridge watchdog")
        self._watch.add_done_callback(self._watchdog_ended)
        logger.info("[vLLM Patch] ✓ Shared memory setup complete! (%s)", self._config.path)

    async def stop(self) -> None:
        """End the watchdog and take back what was published."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        for handle in self._handles:
            if handle is not None and handle["kind"] == "shm":
                _unlink(handle["path"])
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
            "gpu_uuids": [h.get("gpu_uuid", "") if h else "" for h in self._handles],
            "ranks": [m.to_json() for m in self._manifests],
        }

    def status(self) -> dict[str, Any]:
        """The state as JSON, with the `instance`, which is another one after each start of the server."""
        return {"instance": self._instance, "engine_dead": compat.engine_is_dead(self._engine), **self.state.to_json()}

    async def init(
        self,
        trainer: str,
        mode: str,
        parameters: dict[str, tuple[tuple[int, ...], str]],
        master_addr: str,
        master_port: int,
        key: str = "",
        transfer: str = "auto",
        events: Sequence[str] = (),
        weight_epoch: int = 0,
    ) -> dict[str, Any]:
        """A trainer joins: compare the layouts, begin an epoch, and have the workers meet it.

        Args:
            parameters: name -> (full shape, dtype) of the trainer's.
            master_addr, master_port: where the trainer's store is.
            key: prefix for this server in it.
            transfer: auto, direct or overlapped; auto overlaps where there is room for a staging buffer.
            events: handles of CUDA events, one for each rank, that a trainer of a single copy records behind its writes.

        Returns:
            instance, epoch, key, data_backend, transfer, weight_version, and follows_writes: checks wait for the events.
        """
        async with self._lock:
            require_fitting(self._manifests, parameters, self._model)
            if events:
                require_one_each("event", len(events), len(self._manifests))
            chosen = await self._ranks.choose_transfer(transfer) if mode == "broadcast" else ""
            epoch = self._or_conflict(lambda: self.state.begin_epoch(trainer, mode, chosen))
            backend = "nccl" if self._manifests[0].entries[0].device.startswith("cuda") else "gloo"
            key = f"{key}/epoch{epoch}"
            # A trainer whose process could not be seen at first (in another container, say) has not ended if it cannot be seen.
            self._trainer_seen = bool(bridge_config.runs_here(trainer))
            if mode == "broadcast":
                direct = chosen == "direct"
                await self._ranks.call("lockstep_join", master_addr, master_port, key, epoch, backend, self.timeout, direct)
            else:
                await self._ranks.call("lockstep_leave")
            refusals = await self._ranks.call("lockstep_follow", list(events) if mode == "single_copy" else [])
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
            if not_finite:
                raise BridgeRefusal(
                    422, f"version {version} is refused: {not_finite} holds NaN or infinity; {self.state.weight_version} stays"
                )
            if self.state.mode == "broadcast":
                await self._until("ready", "prepare", version, also=("received",))
            self._enter(Phase.PREPARED, version)
            if self.state.transfer == "overlapped":
                await self._ranks.call("lockstep_receive", version)
            return {"state": self.state.phase}

    async def pause(self, epoch: int, version: int) -> dict[str, Any]:
        """Stop the engine between two steps and, for a direct transfer, have the workers receive."""
        async with self._lock:
            await self._pause_engine(epoch, version)
            if self.state.transfer == "direct":
                await self._ranks.call("lockstep_receive", version)
            return {"state": self.state.phase}

    async def commit(self, epoch: int, version: int, checksums: list[str], resume: bool = False) -> dict[str, Any]:
        """Make the transferred weights the live ones on every rank, and prove that they are what the trainer sent.

        Args:
            checksums: per rank, what the trainer computed from its own tensors.
            resume: go on at once to serve the version.
        """
        async with self._lock:
            went_on_at = None
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.TRANSFERRED))
            require_one_each("checksum", len(checksums), len(self._manifests))
            try:
                if self.state.mode == "broadcast":
                    arrived = await self._until("received", "transfer", version)
                else:
                    arrived, went_on_at = await self._checked("lockstep_check", checksums, version, resume)
                self._enter(Phase.TRANSFERRED, version)
                compare(arrived, checksums, version, "received")
                if self.state.transfer == "overlapped":
                    await self._pause_engine(epoch, version)
                    arrived, went_on_at = await self._checked("lockstep_commit", checksums, version, resume)
                self._enter(Phase.COMMITTED, version)
                compare(arrived, checksums, version, "holds after the commit")
            except BridgeRefusal as refusal:
                if self.state.in_update:
                    await self._give_up(str(refusal))
                raise
            self._enter(Phase.VERIFIED, version)
            self.state.checksums = list(checksums)
            return await self._serve(version, went_on_at) if resume else {"state": self.state.phase, "checksums": checksums}

    async def resume(self, epoch: int, version: int) -> dict[str, Any]:
        """Serve the new version."""
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.SERVING))
            return await self._serve(version)

    async def abort(self, epoch: int, reason: str) -> dict[str, Any]:
        """The trainer gives the update up."""
        async with self._lock:
            self._or_conflict(lambda: self.state.check_epoch(epoch))
            if self.state.in_update:
                await self._give_up(f"the trainer gave up: {reason}")
            return self.status()

    # -- what the arrows are made of

    async def _pause_engine(self, epoch: int, version: int) -> None:
        self._or_conflict(lambda: self.state.check(epoch, version, Phase.PAUSED))
        # What was sampled so far is handed out afterwards: with hundreds of requests that takes longer than the whole update.
        self._outputs.hold(self.timeout)
        try:
            await asyncio.wait_for(compat.pause_and_keep(self._engine, clear_cache=not self._keep_cache), self.timeout)
        except TimeoutError:
            reason = f"the engine did not pause within {self.timeout:g} s for version {version}"
            await self._give_up(reason)
            raise BridgeRefusal(504, reason) from None
        except Exception:
            self._outputs.release()
            raise
        self._engine_paused = True
        self._pauses += 1
        self._enter(Phase.PAUSED, version)

    async def _checked(self, method: str, checksums: list[str], version: int, resume: bool) -> tuple[list[Any], float | None]:
        """Each rank's answer to a check, and when the engine went on: None if it was not asked to, or was not given what it
        expected.
        """
        if not resume:
            return await self._ranks.call(method), None
        answers, went_on_at = await self._ranks.check_and_go_on(method, checksums, version)
        self._engine_paused = went_on_at is None
        return answers, went_on_at

    async def _serve(self, version: int, went_on_at: float | None = None) -> dict[str, Any]:
        begun = time.monotonic() if went_on_at is None else went_on_at
        self._spans.switch_at(begun, self.state.weight_version, version)
        self._enter(Phase.SERVING, version)
        in_flight = compat.has_requests(self._engine)
        await self._resume_engine()
        self._clock.resumed(begun, in_flight)
        self.state.last_update = self._clock.seconds
        self.state.last_bytes = self._rank_bytes if self.state.mode == "broadcast" else 0
        logger.info("[Bridge] Serving weight version %d (epoch %d, %s)", version, self.state.epoch, self._clock)
        return {"state": self.state.phase, "weight_version": version, "seconds": dict(self._clock.seconds)}

    async def _give_up(self, reason: str) -> None:
        """End the update; go on with the old version if its weights are untouched, else become unhealthy."""
        version, phase = self.state.target_version, self.state.phase
        let_go = [True]
        if self.state.mode == "broadcast":
            let_go = await self._ranks.call("lockstep_discard", _LET_GO_SECONDS)
        # Whatever the phase, the weights themselves say whether they are still the old ones; unless somebody may yet write.
        settled = all(let_go) or self.state.transfer != "direct"
        live = [answer["checksum"] for answer in await self._ranks.call("lockstep_check")]
        self.state.fail(reason, weights_intact=settled and live == self.state.checksums)
        if self.state.healthy:
            await self._resume_engine()
            outcome = f"serving version {self.state.weight_version}"
        else:
            self._outputs.release()
            outcome = "UNHEALTHY until a full update succeeds (GET /health answers 503)"
        logger.error("[Bridge] Update to version %s failed in phase %s: %s; now %s", version, phase, reason, outcome)

    async def _until(self, wanted: str, phase: str, version: int, also: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        waiting = f"waiting for {self.state.trainer}"
        return await self._ranks.until(wanted, f"{phase} of version {version}", waiting, also, may_block=self._engine_paused)

    async def _resume_engine(self) -> None:
        try:
            if self._engine_paused:
                await self._engine.resume_generation()
                self._engine_paused = False
        finally:
            self._outputs.release()

    async def _watch_updates(self) -> None:
        """Give up an update whose trainer has gone silent or whose worker has lost it."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._lock.locked():
                continue
            async with self._lock:
                if not self.state.in_update:
                    await self._note_first_step()
                    continue
                try:
                    await self._give_up_if_lost()
                except BridgeRefusal as refusal:
                    # The workers do not even answer; whether the weights are whole cannot be known.
                    self.state.fail(str(refusal), weights_intact=False)
                    self._outputs.release()
                    logger.error("[Bridge] %s; UNHEALTHY until a full update succeeds", refusal)

    async def _note_first_step(self) -> None:
        if self._clock.wants_first_step:
            with suppress(BridgeRefusal):  # that the engine is dead or stuck is told by whatever needs it
                self._clock.stepped(await self._ranks.first_step())

    async def _give_up_if_lost(self) -> None:
        if self._clock.is_late:
            await self._give_up(f"nothing from {self.state.trainer} for {self.timeout:g} s")
        elif self._trainer_seen and not bridge_config.runs_here(self.state.trainer):
            await self._give_up(f"{self.state.trainer} has ended")
        elif self.state.mode == "broadcast":
            for status in await self._ranks.call("lockstep_status"):
                if status["phase"] == "failed" or status["trainer_gone"]:
                    reason = status["error"] or f"{self.state.trainer} has ended"
                    await self._give_up(f"rank {status['tp_rank']}: {reason}")
                    return

    def _watchdog_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("[Bridge] the watchdog has died, updates are refused from now on: %r", task.exception())
            self.state.fail(f"the bridge's watchdog died: {task.exception()!r}", weights_intact=False)

    def _enter(self, phase: Phase, version: int) -> None:
        self._clock.enter(phase)
        self.state.advance(phase, version)

    def _or_conflict(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BridgeConflict as conflict:
            raise BridgeRefusal(409, str(conflict)) from conflict

    def _write_config(self) -> None:
        facts = {key: value for key, value in self.info().items() if key != "ranks"}
        facts |= {"epoch": self.state.epoch, "trainer": self.state.trainer}
        self._config.publish(facts, self._manifests, self._handles)


def _unlink(path: str | Path) -> None:
    Path(path).unlink(missing_ok=True)
