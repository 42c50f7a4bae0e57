"""Carries the bridge's state machine out against a running engine. Lives in the server's API process, one per server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_patching import compat
from vllm_patching.bridge_state import BridgeConflict, BridgeState, Phase
from vllm_patching.manifest import Manifest, mismatches
from vllm_patching.version_spans import VersionSpans

logger = logging.getLogger("vllm.lockstep.bridge")

CONFIG_NAME = "vllm_bridge_config.json"
_POLL_SECONDS = 0.005
_WATCH_SECONDS = 0.5


class BridgeRefusal(RuntimeError):
    """An answer other than success: the HTTP status and one sentence that says what and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BridgeController:
    """One method for each arrow of the state machine, each with a deadline and an answer for failure."""

    def __init__(self, engine: Any, model: str, dtype: str, timeout: float, config_dir: Path, spans: VersionSpans) -> None:
        self.state = BridgeState()
        self.timeout = timeout
        self._engine = engine
        self._model = model
        self._dtype = dtype
        self._config_path = config_dir / CONFIG_NAME
        self._spans = spans
        self._manifests: list[Manifest] = []
        self._handles: list[dict[str, Any] | None] = []
        self._lock = asyncio.Lock()
        self._deadline = 0.0
        self._phase_started = 0.0
        self._seconds: dict[str, float] = {}
        self._engine_paused = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the workers' weights and write the config file. Raises whatever keeps the weights from being shared."""
        setups = await self._rpc("lockstep_setup", True)
        self._manifests = sorted((Manifest.from_json(s["manifest"]) for s in setups), key=lambda m: m.tp_rank)
        setups = sorted(setups, key=lambda s: s["manifest"]["tp_rank"])
        self._handles = [s["handles"] for s in setups]
        self.state.checksums = [s["checksum"] for s in setups]
        self._write_config()
        self._watch = asyncio.create_task(self._watch_updates(), name="bridge watchdog")
        self._watch.add_done_callback(self._watchdog_ended)
        logger.info("[vLLM Patch] ✓ Shared memory setup complete! (%s)", self._config_path)

    async def stop(self) -> None:
        """End the watchdog and take back what was published: the config file and the shared memory."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        for handle in self._handles:
            if handle is not None and handle["kind"] == "shm":
                _unlink(handle["path"])
        _unlink(self._config_path)

    def info(self) -> dict[str, Any]:
        """Everything a trainer must know before it joins, but for the storage handles, which only the config file holds."""
        return {
            "model": self._model,
            "dtype": self._dtype,
            "tp_degree": len(self._manifests),
            "weight_version": self.state.weight_version,
            "config_path": str(self._config_path.resolve()),
            "hostname": os.uname().nodename,
            "bridge_timeout": self.timeout,
            "device": self._manifests[0].entries[0].device.split(":")[0],
            "gpu_uuids": [h.get("gpu_uuid", "") if h else "" for h in self._handles],
            "ranks": [m.to_json() for m in self._manifests],
        }

    async def init(
        self, trainer: str, mode: str, parameters: dict[str, tuple[tuple[int, ...], str]], master_addr: str, master_port: int
    ) -> dict[str, Any]:
        """A trainer joins: compare the layouts, begin an epoch, and have the workers meet it."""
        async with self._lock:
            for manifest in self._manifests:
                problems = mismatches(manifest, parameters)
                if problems:
                    raise BridgeRefusal(
                        422,
                        f"{len(problems)} parameter(s) of the trainer do not fit vLLM's rank {manifest.tp_rank} "
                        f"(server's model: {self._model}): {'; '.join(problems[:5])}. "
                        "Start both with the same model and dtype.",
                    )
            epoch = self._or_conflict(lambda: self.state.begin_epoch(trainer, mode))
            world_size = 1 + len(self._manifests)
            backend = "nccl" if self._manifests[0].entries[0].device.startswith("cuda") else "gloo"
            if mode == "broadcast":
                await self._rpc("lockstep_join", master_addr, master_port, epoch, world_size, backend, self.timeout)
            self._write_config()
            logger.info("[Bridge] %s joins as epoch %d (%s)", trainer, epoch, mode)
            return {
                "epoch": epoch,
                "world_size": world_size,
                "data_backend": backend,
                "weight_version": self.state.weight_version,
            }

    async def prepare(self, epoch: int, version: int) -> dict[str, Any]:
        """Announce a version; every rank must have joined by then."""
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.PREPARED))
            if self.state.mode == "broadcast":
                await self._until_ranks("ready", "prepare", version, also=("staged",))
            self._seconds = {}
            self._enter(Phase.PREPARED, version)
            return {"state": self.state.phase}

    async def pause(self, epoch: int, version: int) -> dict[str, Any]:
        """Stop the engine between two steps and, for a broadcast, have the workers receive."""
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.PAUSED))
            try:
                await asyncio.wait_for(compat.pause_and_keep(self._engine), self.timeout)
            except TimeoutError:
                reason = f"the engine did not pause within {self.timeout:g} s for version {version}"
                await self._give_up(reason)
                raise BridgeRefusal(504, reason) from None
            self._engine_paused = True
            if self.state.mode == "broadcast":
                await self._rpc("lockstep_receive", version)
            self._enter(Phase.PAUSED, version)
            return {"state": self.state.phase}

    async def commit(self, epoch: int, version: int, checksums: list[str]) -> dict[str, Any]:
        """Make the transferred weights the live ones on every rank, and prove that they are what the trainer sent.

        Args:
            checksums: per rank, what the trainer computed from its own tensors.
        """
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.TRANSFERRED))
            if len(checksums) != len(self._manifests):
                raise BridgeRefusal(422, f"{len(checksums)} checksum(s) for {len(self._manifests)} rank(s)")
            try:
                if self.state.mode == "broadcast":
                    live = await self._commit_staged(version, checksums)
                else:
                    live = await self._accept_written(version)
            except BridgeRefusal as refusal:
                await self._give_up(str(refusal))
                raise
            self._enter(Phase.COMMITTED, version)
            for rank, (mine, theirs) in enumerate(zip(live, checksums, strict=True)):
                if mine != theirs:
                    reason = (
                        f"rank {rank} holds checksum {mine} after the commit of version {version}, the trainer sent {theirs}"
                    )
                    await self._give_up(reason)
                    raise BridgeRefusal(500, f"{reason}; the server is unhealthy until a full update succeeds")
            self._enter(Phase.VERIFIED, version)
            self.state.checksums = live
            return {"state": self.state.phase, "checksums": live}

    async def resume(self, epoch: int, version: int) -> dict[str, Any]:
        """Serve the new version."""
        async with self._lock:
            self._or_conflict(lambda: self.state.check(epoch, version, Phase.SERVING))
            self._spans.switch(self.state.weight_version, version, compat.output_token_counts(self._engine))
            self._enter(Phase.SERVING, version)
            self.state.last_update = dict(self._seconds)
            await self._resume_engine()
            logger.info("[Bridge] Serving weight version %d (epoch %d, %s)", version, epoch, self._seconds_text())
            return {"state": self.state.phase, "weight_version": version, "seconds": self.state.last_update}

    async def abort(self, epoch: int, reason: str) -> dict[str, Any]:
        """The trainer gives the update up."""
        async with self._lock:
            self._or_conflict(lambda: self.state.check_epoch(epoch))
            if self.state.in_update:
                await self._give_up(f"the trainer gave up: {reason}")
            return self.state.to_json()

    # -- what the arrows are made of

    async def _commit_staged(self, version: int, expected: list[str]) -> list[str]:
        await self._until_ranks("staged", "transfer", version)
        self._enter(Phase.TRANSFERRED, version)
        staged = await self._rpc("lockstep_verify_staged", version)
        for answer in staged:
            rank = answer["tp_rank"]
            if answer["error"]:
                raise BridgeRefusal(
                    422, f"rank {rank} refuses version {version}: {answer['error']}; version {self.state.weight_version} stays"
                )
            if answer["checksum"] != expected[rank]:
                raise BridgeRefusal(
                    502,
                    f"rank {rank} received checksum {answer['checksum']} for version {version}, the trainer sent "
                    f"{expected[rank]}; version {self.state.weight_version} stays",
                )
        answers = await self._rpc("lockstep_commit")
        return [a["checksum"] for a in sorted(answers, key=lambda a: a["tp_rank"])]

    async def _accept_written(self, version: int) -> list[str]:
        self._enter(Phase.TRANSFERRED, version)
        for rank, bad in enumerate(await self._rpc("lockstep_first_not_finite")):
            if bad:
                raise BridgeRefusal(422, f"rank {rank}: {bad} holds NaN or infinity in version {version}")
        return list(await self._rpc("lockstep_checksum"))

    async def _give_up(self, reason: str) -> None:
        """End the update; go on with the old version if its weights are untouched, else become unhealthy."""
        version, phase = self.state.target_version, self.state.phase
        if self.state.mode == "broadcast":
            await self._rpc("lockstep_discard")
        # Whatever the phase, the weights themselves say whether they are still the old ones.
        intact = list(await self._rpc("lockstep_checksum")) == self.state.checksums
        self.state.fail(reason, intact)
        if self.state.healthy:
            await self._resume_engine()
            outcome = f"serving version {self.state.weight_version}"
        else:
            outcome = "UNHEALTHY until a full update succeeds (GET /health answers 503)"
        logger.error("[Bridge] Update to version %s failed in phase %s: %s; now %s", version, phase, reason, outcome)

    async def _until_ranks(self, wanted: str, phase: str, version: int, also: tuple[str, ...] = ()) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            statuses = await self._rpc("lockstep_status")
            for status in statuses:
                if status["phase"] == "failed":
                    raise BridgeRefusal(
                        502,
                        f"rank {status['tp_rank']} failed in {phase} of version {version} (epoch {status['epoch']}): "
                        f"{status['error']}",
                    )
            late = [s for s in statuses if s["phase"] not in (wanted, *also)]
            if not late:
                return
            if time.monotonic() > deadline:
                who = ", ".join(f"rank {s['tp_rank']} is {s['phase']}" for s in late)
                raise BridgeRefusal(
                    504, f"{phase} of version {version}: {who} after {self.timeout:g} s, waiting for {self.state.trainer}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _resume_engine(self) -> None:
        if self._engine_paused:
            await self._engine.resume_generation()
            self._engine_paused = False

    async def _watch_updates(self) -> None:
        """Give up an update whose trainer has gone silent or whose worker has lost it."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if not self.state.in_update or self._lock.locked():
                continue
            async with self._lock:
                try:
                    await self._give_up_if_lost()
                except BridgeRefusal as refusal:
                    # The workers do not even answer; whether the weights are whole cannot be known.
                    self.state.fail(str(refusal), weights_intact=False)
                    logger.error("[Bridge] %s; UNHEALTHY until a full update succeeds", refusal)

    async def _give_up_if_lost(self) -> None:
        if not self.state.in_update:
            return
        if time.monotonic() > self._deadline:
            await self._give_up(f"nothing from {self.state.trainer} for {self.timeout:g} s")
        elif self.state.mode == "broadcast":
            for status in await self._rpc("lockstep_status"):
                if status["phase"] == "failed":
                    await self._give_up(f"rank {status['tp_rank']}: {status['error']}")
                    return

    def _watchdog_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("[Bridge] the watchdog has died, updates are refused from now on: %r", task.exception())
            self.state.fail(f"the bridge's watchdog died: {task.exception()!r}", weights_intact=False)

    def _enter(self, phase: Phase, version: int) -> None:
        now = time.monotonic()
        if phase is not Phase.PREPARED:
            self._seconds[f"to_{phase}"] = now - self._phase_started
        self._phase_started = now
        self._deadline = now + self.timeout
        self.state.advance(phase, version)

    def _seconds_text(self) -> str:
        return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self._seconds.items())

    def _or_conflict(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BridgeConflict as conflict:
            raise BridgeRefusal(409, str(conflict)) from conflict

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            return list(await asyncio.wait_for(self._engine.collective_rpc(method, args=args), self.timeout))
        except TimeoutError:
            raise BridgeRefusal(504, f"vLLM's workers did not answer {method} within {self.timeout:g} s") from None

    def _write_config(self) -> None:
        """Write the config file atomically, readable by this user alone: it holds the handles to the weights' memory."""
        data = {
            **{key: value for key, value in self.info().items() if key != "ranks"},
            "epoch": self.state.epoch,
            "pid": os.getpid(),
            "rendezvous": {
                "MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost"),
                "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
            },
            "param_mappings": self._manifests[0].to_json()["param_mappings"],
            "ranks": [{**m.to_json(), "handles": h} for m, h in zip(self._manifests, self._handles, strict=True)],
        }
        temporary = self._config_path.with_suffix(f".{os.getpid()}.tmp")
        self._config_path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(data, file)
        temporary.replace(self._config_path)


def _unlink(path: str | Path) -> None:
    Path(path).unlink(missing_ok=True)
