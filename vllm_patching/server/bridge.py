"""One server's bridge: the parts that it is made of, and what can be read of it at any time."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm_patching.compat.engine import engine_is_dead, memory_share, replicas
from vllm_patching.compat.outputs import follow_outputs, output_token_counts
from vllm_patching.compat.requests import salt_prefix_cache
from vllm_patching.protocol.lease import Leases
from vllm_patching.protocol.manifest import Manifest, flat_layout
from vllm_patching.protocol.timeline import Timeline
from vllm_patching.protocol.workers import BridgeWorker
from vllm_patching.protocol.writers import Writer
from vllm_patching.server import config_file as bridge_config
from vllm_patching.server.calling_off import CallingOff
from vllm_patching.server.engine_switch import EngineState, EngineSwitch
from vllm_patching.server.ranks import RankCalls
from vllm_patching.server.settlement import Settlement
from vllm_patching.server.silence import Silence
from vllm_patching.server.state import BridgeState
from vllm_patching.server.timeline import ServerTimeline
from vllm_patching.server.turns import Turns
from vllm_patching.server.update_clock import UpdateClock
from vllm_patching.server.version_spans import VersionSpans
from vllm_patching.server.watchdog import BridgeWatchdog

logger = logging.getLogger("vllm.lockstep.bridge")


class Bridge:
    """Opens the weights of an engine, and says where the bridge is; `BridgeController` changes
    that.
    """

    settles: type[Settlement] = Settlement
    """What ends updates that failed."""

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
        timeline: ServerTimeline | None = None,
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
            timeline: told when the engine stands still, and of updates.
        """
        self.state = BridgeState()
        self.timeout = timeout
        self.engine_trouble: Callable[[], str] = lambda: ""
        """Return why the engine makes no progress; empty while it does."""
        self._engine = engine
        self._silence = Silence()
        self._ranks = RankCalls(engine, timeout, self._silence)
        self._switch = EngineSwitch(engine, timeout, keep_cache, self._silence)
        self.timeline = timeline or ServerTimeline(Timeline(None, "generator", ""))
        self._switch.told = self.timeline.engine
        self._leases = Leases()
        self._model, self._dtype = model, dtype
        self._config = bridge_config.ConfigFile(config_dir, port)
        self._spans = spans
        self._keep_cache = keep_cache
        self.instance = uuid.uuid4().hex
        """Another one after each start of the server."""
        self._manifests: list[Manifest] = []
        self._handles: list[dict[str, Any] | None] = []
        self._gpu_uuids: list[str] = []
        self._rank_bytes = 0
        self._replicas = 1
        self._cohort = ""
        self._calling_off = CallingOff()
        self._lock = asyncio.Lock()
        self._clock = UpdateClock(timeout)
        self._writers = self._unseen = tuple[Writer, ...]()
        self._settlement = self.settles(self.state, self._ranks, self._leases, self._switch)
        self.turns = Turns(
            self.state, self._ranks, self._switch, self._lock, lambda: (self._writers, self._unseen)
        )
        self._watchdog = BridgeWatchdog(
            self.state, self._ranks, self._settlement, self._clock, self._lock, self.turns
        )

    async def start(self) -> None:
        """Open the workers' weights and write the config file. Raises whatever keeps the weights
        from being shared, or the file from being written (bridge_config.ConfigFileError).
        """
        await self._ranks.require_engine_core()
        # A trainer whose memory were one replica's would leave the others behind.
        share_storage = replicas(self._engine) == 1
        of_all = sorted(
            await self._ranks.call(BridgeWorker.lockstep_setup, share_storage),
            key=lambda s: s["manifest"]["tp_rank"],
        )
        self._replicas = 1 + max(setup["replica"] for setup in of_all)
        setups = [setup for setup in of_all if setup["replica"] == 0]
        self._manifests = [Manifest.from_json(s["manifest"]) for s in setups]
        self._ranks.count(len(setups), self._replicas)
        self._handles = [s["handles"] for s in setups]
        self._gpu_uuids = [
            s["gpu_uuid"] for s in sorted(of_all, key=lambda setup: setup["replica"])
        ]
        self._rank_bytes = self._replicas * sum(
            flat_layout(manifest)[1] for manifest in self._manifests
        )
        self.state.checksums = [s["checksum"] for s in setups]
        count = partial(output_token_counts, self._engine)
        follow_outputs(
            self._engine, self._spans.known, lambda moment: self._spans.outputs_of(moment, count)
        )
        if self._keep_cache:
            # What is accepted before a pause may go on with older keys and values; what is accepted
            # after it never sees them.
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
        """Everything a trainer must know before it joins, but for the storage handles: only the
        config file has those.
        """
        return {
            "instance": self.instance,
            "model": self._model,
            "dtype": self._dtype,
            "tp_degree": len(self._manifests),
            "replicas": self._replicas,
            "weight_version": self.state.weight_version,
            "config_path": str(self._config.path),
            "hostname": os.uname().nodename,
            "bridge_timeout": self.timeout,
            "device": self._manifests[0].entries[0].device.split(":")[0],
            "cache_bytes": self.turns.bytes,
            "gpu_uuids": self._gpu_uuids,
            "gpu_memory_utilization": memory_share(self._engine),
            "ranks": [m.to_json() for m in self._manifests],
        }

    def status(self) -> dict[str, Any]:
        """The state as JSON, with the `instance`, which is another one after each start of the
        server; what the engine does; who may write the weights; what the ranks' updater threads did
        at the last look (nothing is asked of them now); and for how many seconds a call in progress
        has not been answered.
        """
        lease, trouble = self._leases.out, self.trouble()
        return {
            **self.state.to_json(),
            **self.turns.to_json(),
            "healthy": not trouble,
            "trouble": trouble,
            "instance": self.instance,
            "engine": str(self._switch.state),
            "engine_dead": engine_is_dead(self._engine),
            "engine_trouble": self.engine_trouble(),
            "lease": None if lease is None else {"holder": lease.holder, "version": lease.version},
            "ranks": self._ranks.last_seen,
            "silent_seconds": self._silence.seconds,
        }

    def trouble(self) -> str:
        """Why nothing can be sampled rightly, by what the engine does; empty if it can, or will
        when an update has ended.
        """
        if self._watchdog.has_ended:
            return f"the bridge's watchdog has ended ({self._watchdog.end}), which notices lost updates; restart the server"
        if silent := self.engine_trouble():
            return silent
        if self.state.quarantine:
            return f"in quarantine: {self.state.quarantine}; a full update from a trainer heals it"
        if not self.state.healthy:
            waits = (
                f" (or until this is known: {self.state.undecided})" if self.state.undecided else ""
            )
            return f"the weights are not whole: {self.state.last_error}; a full update from a trainer heals it{waits}"
        changing = self.state.in_update or self.turns.changing or self._switch.resting
        if not changing and self._switch.state is not EngineState.RUNNING:
            return f"the engine is {self._switch.state} outside an update; a full update from a trainer or a restart heals it"
        return self.turns.trouble

    @property
    def holds_engine(self) -> bool:
        """Whether the engine stands still because it was told to.

        While it is told to pause, it should still answer.
        """
        in_update = self.state.in_update and self._switch.state is not EngineState.RUNNING
        return (
            in_update or self.turns.changing or self._switch.resting
        ) and not self._switch.pausing

    def _write_config(self) -> None:
        facts = {key: value for key, value in self.info().items() if key != "ranks"}
        facts |= {"epoch": self.state.epoch, "trainer": self.state.trainer}
        self._config.publish(facts, self._manifests, self._handles)
