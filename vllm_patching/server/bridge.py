"""The bridge of one server, in its API process. It carries the state machine of updates out against
a running engine, rolls failed updates back, and watches the trainer between its calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from vllm_patching.compat.engine import engine_is_dead, memory_share, replicas, require_commands
from vllm_patching.compat.outputs import follow_outputs, has_requests, output_token_counts
from vllm_patching.compat.requests import salt_prefix_cache
from vllm_patching.protocol.manifest import Manifest, flat_layout
from vllm_patching.protocol.messages import (
    OCCUPIED,
    BridgeRefusal,
    BridgeWorker,
    Check,
    CohortBody,
    CohortOrder,
    Writer,
    compare,
    rank_name,
)
from vllm_patching.server import config_file as bridge_config
from vllm_patching.server.engine_calls import (
    EngineState,
    EngineSwitch,
    RankCalls,
    Silence,
    require_fitting,
    require_one_each,
)
from vllm_patching.server.state import (
    BridgeConflict,
    BridgeState,
    LeaseLost,
    Leases,
    Occupied,
    UpdateGivenUp,
    VersionSpans,
    Weights,
)
from vllm_patching.server.timeline import ServerTimeline
from vllm_patching.server.turns import NO_TURNS, Turns

logger = logging.getLogger("vllm.lockstep.bridge")


FIRST_STEP_SECONDS = 10.0
"""Seconds after an update within which the worker's first step is looked up. The requests that
waited for the step may have been given up."""


class UpdateClock:
    """The times of the present update. Moments are time.monotonic(), in seconds."""

    def __init__(self, timeout: float) -> None:
        """
        Args:
            timeout: seconds for each step.
        """
        self.timeout = timeout
        self.began = 0.0
        """When the last one began."""
        self._entered = 0.0
        self._paused_at = 0.0
        self._first_step_until = 0.0
        self.seconds: dict[str, float] = {}
        """Seconds of the update. `to_<mark>`: since the previous mark (paused, transferred,
        committed, verified, serving). `halted`: from the pause to the engine's answer that it
        continues. `resume`: duration of that answer. `stalled`: from the pause to the engine's next
        step."""

    def begin(self) -> None:
        """An update begins."""
        self.seconds = {}
        self._first_step_until = 0.0
        self.began = self._entered = time.monotonic()

    def reach(self, mark: str) -> None:
        """Note that the update has reached `mark`. The next step has `timeout` seconds from now."""
        now = time.monotonic()
        self.seconds[f"to_{mark}"] = now - self._entered
        if mark == "paused":
            self._paused_at = now
        self._entered = now

    @property
    def deadline(self) -> float:
        """Return the moment by which the next mark must be reached."""
        return self._entered + self.timeout

    @property
    def is_late(self) -> bool:
        """Return whether the next mark was not reached in time."""
        return time.monotonic() > self.deadline

    def resumed(self, asked: float, in_flight: bool) -> None:
        """Note the engine's answer that it continues. The question was sent at the moment `asked`.

        Args:
            in_flight: requests waited for that. Without any, the next step belongs to a later
                request and measures nothing.
        """
        now = time.monotonic()
        self.seconds |= {"halted": now - self._paused_at, "resume": now - asked}
        self._first_step_until = now + FIRST_STEP_SECONDS if in_flight else 0.0

    @property
    def wants_first_step(self) -> bool:
        """Return whether the moment of the engine's next step is still open."""
        return time.monotonic() < self._first_step_until

    def stepped(self, began: float | None) -> None:
        """Take in the moment at which the engine's next step began; None if it took none, or
        reports none.
        """
        if began is not None:
            self.seconds["stalled"] = began - self._paused_at
            self._first_step_until = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.seconds.items())


LET_GO_SECONDS = 2.0
"""Seconds for a worker's updater thread to end its writes."""


class Settlement:
    """Ends failed updates. The engine continues with the old version if its weights are proven to
    be whole, else it stays paused. Call with the controller's lock held.

    Weights are whole if no process may write them (see Lease) and their checksums are the served
    version's. While one of the two facts is open, the server is unhealthy and undecided, and
    `look_again` can still find that all is well.
    """

    def __init__(
        self, state: BridgeState, ranks: RankCalls, leases: Leases, switch: EngineSwitch
    ) -> None:
        self._state, self._ranks, self._leases, self._switch = state, ranks, leases, switch
        self._said = ""

    async def give_up(self, reason: str, trainer_silent: bool = False) -> None:
        """End the update.

        Never raises: what cannot be found out or done is left undecided. Arguments: see
        BridgeState.fail.
        """
        version = self._state.target_version
        whole, undecided = await self._look()
        if whole and not self._state.awaits_weights:
            whole, undecided = await self._go_on()
        self._state.fail(reason, whole, undecided, trainer_silent)
        if self._state.healthy:
            outcome = f"serving version {self._state.weight_version}"
        else:
            await self.stand_still()
            outcome = "UNHEALTHY until a full update succeeds (GET /health answers 503)"
            if undecided:
                outcome += f", or until this is known: {undecided}"
        logger.error("[Bridge] Update to version %s failed: %s; now %s", version, reason, outcome)

    async def look_again(self) -> None:
        """Outside an update: see that an unhealthy engine stands still, and decide what was
        undecided if it is known now.
        """
        if self._state.healthy:
            return
        await self.stand_still()
        if not self._state.undecided or not self._switch.paused:
            return
        whole, undecided = await self._look()
        if whole and not self._state.awaits_weights:
            whole, undecided = await self._go_on()
        if undecided:
            self._state.undecided = undecided
            return
        self._state.decide(whole)
        if self._state.healthy:
            logger.warning(
                "[Bridge] No process can write the weights any more, and they still have version "
                "%d: serving version %d",
                *[self._state.weight_version] * 2,
            )
        else:
            logger.error(
                "[Bridge] The weights are not whole, as is known now: UNHEALTHY until a full update succeeds"
            )

    async def require_no_writer(self, timeout: float) -> None:
        """Return when no process may write the weights under an earlier update. Waits for the
        server's own threads.

        Args:
            timeout: seconds.

        Raises:
            BridgeRefusal: names who may still write, and what to do.
        """
        deadline = time.monotonic() + timeout
        while not await self._nobody_writes():
            lease = self._leases.out
            assert lease is not None
            if lease.writers or time.monotonic() > deadline:
                raise BridgeRefusal(
                    OCCUPIED, f"no other process may write the weights now: {lease.remedy}"
                )

    async def stand_still(self) -> None:
        """See that the engine stands still.

        If it does not answer, `look_again` tries again. The same reason is logged once.
        """
        told = ""
        try:
            if not self._switch.paused:
                await self._switch.pause()
            self._switch.release_outputs()
        except BridgeRefusal as refusal:
            told = str(refusal)
            if told != self._said:
                logger.error(
                    "[Bridge] the engine, whose weights may not be whole, could not be stopped: %s",
                    told,
                )
        self._said = told

    async def _look(self) -> tuple[bool, str]:
        """Return whether the live weights are the served version's and no process may write them;
        and the reason if that is open.
        """
        try:
            if self._state.mode == "broadcast" and self._state.in_update:
                await self._ranks.call(BridgeWorker.lockstep_discard, LET_GO_SECONDS)
            if not await self._nobody_writes():
                assert self._leases.out is not None
                return False, self._leases.out.remedy
            answers = await self._ranks.call(BridgeWorker.lockstep_check)
        except BridgeRefusal as refusal:
            return False, str(refusal)
        expected = self._state.checksums
        return all(answer["checksum"] == expected[answer["tp_rank"]] for answer in answers), ""

    async def _go_on(self) -> tuple[bool, str]:
        try:
            await self._switch.resume()
        except BridgeRefusal as refusal:
            return False, str(refusal)
        return True, ""

    async def _nobody_writes(self) -> bool:
        """Return whether no lease is out. A lease whose holder has ended its work ends here."""
        lease = self._leases.out
        if lease is None:
            return True
        done = (
            lease.has_ended
            if lease.writers
            else all(await self._ranks.call(BridgeWorker.lockstep_discard, LET_GO_SECONDS))
        )
        if done:
            self._leases.end()
        return done


WATCH_SECONDS = 0.5
_ENDING_SECONDS = 0.2


class BridgeWatchdog:
    """Gives up an update whose trainer has ended or is silent, or whose worker has lost it; decides
    what was left undecided.

    It survives its own errors. If it ends nevertheless, `has_ended` is true, and no update may
    begin.
    """

    def __init__(
        self,
        state: BridgeState,
        ranks: RankCalls,
        settlement: Settlement,
        clock: UpdateClock,
        lock: asyncio.Lock,
        turns: Turns,
    ) -> None:
        """
        Args:
            lock: held by each call that changes the state. A call of the trainer's watches its own
                update.
        """
        self._state, self._ranks, self._settlement, self._clock, self._lock = (
            state,
            ranks,
            settlement,
            clock,
            lock,
        )
        self._turns = turns
        self._writers: Sequence[Writer] = ()
        self._task: asyncio.Task[None] | None = None
        self._said = ""
        self.end = ""
        """Why it has ended."""

    @property
    def has_ended(self) -> bool:
        """Return whether it was started and has ended."""
        return self._task is not None and self._task.done()

    def follow(self, writers: Sequence[Writer]) -> None:
        """Set the visible processes of the present trainer. The update ends when one of them ends."""
        self._writers = writers

    def start(self) -> None:
        """Begin. Call from within the event loop."""
        self._task = asyncio.create_task(self._watch(), name="bridge watchdog")
        self._task.add_done_callback(self._note_end)

    async def stop(self) -> None:
        """End the watch."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._lock.locked():
                continue
            async with self._lock:
                await self._look()

    async def _look(self) -> None:
        try:
            if self._turns.bytes and not self._state.in_update:
                await self._turns.look()
            if self._state.in_update:
                if self._clock.is_late:
                    silent = f"nothing from {self._state.trainer} for {self._clock.timeout:g} s"
                    await self._settlement.give_up(silent, trainer_silent=True)
                elif reason := await self._lost():
                    await self._settlement.give_up(reason)
                return
            if self._ranks.are_joining:
                with suppress(BridgeRefusal):  # the next update reports it
                    await self._ranks.statuses()
            if not self._state.healthy:
                await self._settlement.look_again()
            else:
                await self._note_first_step()
        except BridgeRefusal as refusal:
            await self._settlement.give_up(
                str(refusal)
            )  # of an update whose workers do not even answer
        except Exception as error:  # noqa: BLE001 - logged and survived
            await self._survive(error)

    async def _survive(self, error: Exception) -> None:
        """Log an error of the watchdog's own, and give up the update that it cannot watch."""
        told = f"the bridge's watchdog failed: {error!r}"
        if told != self._said:
            logger.exception("[Bridge] %s; it goes on", told)
        self._said = told
        if self._state.in_update:
            self._state.fail(told, weights_intact=False, undecided=told)
            await self._settlement.stand_still()

    async def _lost(self) -> str:
        """Return why the update cannot succeed; empty while it can."""
        if ended := self._ended():
            return ended
        if self._state.mode == "broadcast":
            for status in await self._ranks.statuses():
                if status["phase"] == "failed" or status["trainer_gone"]:
                    # The connections of a process that is killed break before it is known to have
                    # ended.
                    await asyncio.sleep(_ENDING_SECONDS)
                    return (
                        self._ended()
                        or f"{rank_name(status)}: {status['error'] or f'{self._state.trainer} has ended'}"
                    )
        return ""

    def _ended(self) -> str:
        """Return which of the trainer's visible processes have ended; empty if none has."""
        ended = [str(writer) for writer in self._writers if writer.has_ended()]
        if not ended:
            return ""
        if len(self._writers) == 1:
            return f"{self._state.trainer} has ended"
        return f"{self._state.trainer} has ended (process {', '.join(ended)})"

    async def _note_first_step(self) -> None:
        if self._clock.wants_first_step:
            with suppress(
                BridgeRefusal
            ):  # each call that needs the engine reports that it is dead or stuck
                self._clock.stepped(await self._ranks.first_step())

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if self._task is None:
            return  # it was stopped
        self.end = "cancelled" if task.cancelled() else repr(task.exception())
        logger.error(
            "[Bridge] the watchdog has ended, updates are refused from now on: %s", self.end
        )


LATE = 410
"""HTTP status for a trainer that is too late and may repeat the update."""
_EVENT_MARGIN_SECONDS = 2.0
"""Seconds by which a worker's wait for a trainer's writes is shorter than other waits, so that its
answer is in time."""


class BridgeController:
    """Carries the state machine of one server's weights out against a running engine.

    Each arrow of the state machine has a method with a deadline and an answer for failure.
    """

    settles: type[Settlement] = Settlement
    """The class that ends failed updates."""

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
            spans: receives every switch of versions.
            keep_cache: let running requests keep the keys and values that older weights computed.
            port: where the server listens; its config file is known by it.
            timeline: receives pauses of the engine, and updates.
        """
        self.state = BridgeState()
        self.timeout = timeout
        self.engine_trouble: Callable[[], str] = lambda: ""
        """Return why the engine makes no progress; empty while it does."""
        self._engine = engine
        self._silence = Silence()
        self._ranks = RankCalls(engine, timeout, self._silence)
        self._switch = EngineSwitch(engine, timeout, keep_cache, self._silence)
        self._timeline: ServerTimeline | None = None
        if timeline is not None and timeline.on:
            self._timeline, self._switch.told = timeline, timeline.engine
        self._leases = Leases()
        self._model, self._dtype = model, dtype
        self._config = bridge_config.ConfigFile(config_dir, port)
        self._spans = spans
        self._keep_cache = keep_cache
        self.instance = uuid.uuid4().hex
        """Another one after each start of the server."""
        self.trainer_kernels: dict[str, str] | None = None
        """Kernels of the trainer that joined last, if it is in deterministic mode."""
        self._manifests: list[Manifest] = []
        self._handles: list[dict[str, Any] | None] = []
        self._recomputes = False
        self._gpu_uuids: list[str] = []
        self._rank_bytes = 0
        self._replicas = 1
        self._cohort = ""
        self._reasons_to_end_waits: list[str] = []
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
        require_commands(self._engine)
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
        self._recomputes = any(s.get("recomputes") for s in setups)
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
            # A request that is accepted before a pause may go on with older keys and values; one
            # that is accepted after it never sees them.
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
        """Return all facts that a trainer needs to join. The storage handles are in the config file
        only.
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
        """Return the state as JSON. It also holds the server's `instance` (new after each start),
        the engine's state and the lease. Further fields are the last known phases of the ranks'
        updater threads, and the seconds for which a call is unanswered.
        """
        lease, trouble = self._leases.out, self.trouble()
        return {
            **self.state.to_json(),
            **(self.turns.to_json() if self.turns.bytes else NO_TURNS),
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
        """Return why no token can be sampled with the right weights; empty if it can, or can after
        the present update.
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
        """Return whether the engine is paused on purpose.

        Before the pause is complete, the engine still has to answer.
        """
        in_update = self.state.in_update and self._switch.state is not EngineState.RUNNING
        return (
            in_update or self.turns.changing or self._switch.resting
        ) and not self._switch.pausing

    def _write_config(self) -> None:
        facts = {key: value for key, value in self.info().items() if key != "ranks"}
        facts |= {"epoch": self.state.epoch, "trainer": self.state.trainer}
        self._config.publish(facts, self._manifests, self._handles)

    async def init(
        self,
        trainer: str,
        mode: str,
        parameters: dict[str, tuple[tuple[int, ...], str]],
        writers: Sequence[Writer],
        transfer: str = "auto",
        events: Sequence[str] = (),
        weight_epoch: int = 0,
        kernels: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Let a trainer join: compare the layouts, and begin an epoch.

        Args:
            parameters: name -> (full shape, dtype) of the trainer's.
            writers: the trainer's processes; all can write a single copy.
            transfer: auto, direct or overlapped; auto overlaps where there is room for a staging
                buffer.
            events: handles of CUDA events, one for each rank, that a trainer of a single copy
                records behind its writes.
            weight_epoch: of the weights that the trainer sends (see version_spans.Weights).
            kernels: of a trainer in deterministic mode, for GET /deterministic; a parameter server
                compares its servers' with them.

        Returns:
            instance, epoch, transfer, weight_version, replicas, and follows_writes: checks wait for
            the events.
        """
        async with self._lock:
            self._require_way(mode, transfer)
            require_fitting(self._manifests, parameters, self._model)
            if events:
                require_one_each("event", len(events), len(self._manifests))
            # First: the end of a turn continues the engine, which must not sample a mixture.
            self._or_conflict(lambda: self.state.check_join(trainer))
            await self.turns.require_over(writers)
            await self._settlement.require_no_writer(self.timeout)
            chosen = await self._ranks.choose_transfer(transfer) if mode == "broadcast" else ""
            epoch = self._or_conflict(
                lambda: self.state.begin_epoch(trainer, mode, chosen, weight_epoch)
            )
            self.trainer_kernels = kernels
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

    def _require_way(self, mode: str, transfer: str) -> None:
        """Raise BridgeRefusal unless weights can come in this way."""
        if mode == "single_copy" and self._replicas > 1:
            raise BridgeRefusal(
                409,
                f"this server has {self._replicas} replicas, and a single copy is the memory of one: broadcast",
            )

    async def _follow(self, writers: Sequence[Writer], events: Sequence[str]) -> bool:
        """Prepare for the trainer that has joined. Return whether checks wait for its events."""
        self._cohort = ""
        # A process that was not visible at first (as in another container) has not ended if it is
        # not visible.
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

    async def cohort(self, body: CohortBody) -> dict[str, Any]:
        """Have the workers' updater threads leave the lanes that they are in, and meet others at
        the trainer's store. Returns at once: `begin` waits for them, and their phases stand in the
        status.
        """
        with self._call_off(body.epoch, "the trainer forms another cohort"):
            async with self._lock:
                self._or_conflict(lambda: self.state.check_epoch(body.epoch))
                self._require_place(body.members, body.index)
                self._cohort = ""
                order: CohortOrder = {
                    "host": body.host,
                    "port": body.port,
                    "secret": body.secret,
                    "key": body.key,
                    "members": body.members,
                    "index": body.index,
                    "lanes": body.lanes,
                    "route": str(body.route),
                    "epoch": body.epoch,
                    "timeout": self.timeout,
                }
                await self._ranks.call(BridgeWorker.lockstep_cohort, order)
                if body.members:
                    self._cohort = body.key
                await self._ranks.statuses()
                return {
                    "epoch": body.epoch,
                    "cohort": self._cohort,
                    "ranks": self._ranks.last_seen,
                }

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
        """Begin an update. Overlapped: the ranks receive beside the live weights. Otherwise the
        engine stops between two steps, and a lease is granted. It goes to the trainer, which may
        write a single copy then. Or it goes to the workers' updater threads, which begin to receive
        (direct).

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
                elif self._recomputes and self.state.mode == "broadcast":
                    arrived, resumed_at = await self._checked(
                        BridgeWorker.lockstep_check, checksums, version
                    )
                self._clock.reach("committed")
                compare(arrived, checksums, version, "holds after the commit")
                self.state.parameters = [
                    answer.get("parameters", "") for answer in arrived if not answer.get("replica")
                ]
                self._clock.reach("verified")
                return await self._serve(epoch, version, checksums, resumed_at)
            except BridgeRefusal as refusal:
                if self.state.in_update:
                    await self._settlement.give_up(str(refusal))
                raise

    async def abort(self, epoch: int, reason: str, lease: str | None = None) -> dict[str, Any]:
        """Give up the update for the trainer, and take its lease back.

        Args:
            lease: the id that the trainer received; None if it received none and so wrote nothing.
                By this call the trainer confirms that it has no writes in flight.
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
        """Serve nothing before a full update, as the trainer demands. Requests are refused, an
        update in progress ends, and the engine is paused.
        """
        self._or_conflict(lambda: self.state.check_epoch(epoch))
        self.state.put_in_quarantine(reason)
        with self._call_off(epoch, f"quarantine: {reason}"):
            async with self._lock:
                # The lock may have been held by the end of an update, or by the next trainer that
                # joins.
                self.state.put_in_quarantine(reason)
                logger.warning("[Bridge] In quarantine: %s", reason)
                if self.state.in_update:
                    await self._settlement.give_up(f"quarantine: {reason}")
                else:
                    await self._settlement.stand_still()
                return self.status()

    # -- what the arrows are made of

    @contextmanager
    def _call_off(self, epoch: int, reason: str) -> Iterator[None]:
        """End all waits for workers within the block, for the trainer of this epoch alone.

        A call that waits for workers holds the lock, so the next call leaves its reason here.
        """
        if epoch != self.state.epoch:
            yield
            return
        self._reasons_to_end_waits.append(reason)
        try:
            yield
        finally:
            self._reasons_to_end_waits.remove(reason)

    def _called_off(self) -> str:
        """Return the reason to end a wait; empty if there is none."""
        return next(iter(self._reasons_to_end_waits), "")

    async def _pause_engine(self) -> None:
        self._switch.hold_outputs(self.timeout)
        await self._switch.pause()
        self._clock.reach("paused")

    async def _checked(
        self, method: Callable[[Any], Check], checksums: list[str], version: int
    ) -> tuple[list[Check], float | None]:
        """Return each rank's answer to a check, and the moment at which the engine continued; None
        if the check failed.
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
        )  # a quarantine may have come in between
        in_flight = has_requests(self._engine) and not self._switch.resting
        await self._switch.resume()
        self._or_conflict(lambda: self.state.check_commit(epoch, version))
        self._clock.reach("serving")
        self.state.serve(list(checksums))
        self._clock.resumed(begun, in_flight)
        self.state.last_update = self._clock.seconds
        if self._timeline is not None:
            self._timeline.updated(self._clock.began, version)
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
            called_off=self._called_off,
        )

    def _or_conflict(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (UpdateGivenUp, LeaseLost) as late:
            raise BridgeRefusal(LATE, str(late)) from late
        except Occupied as occupied:
            raise BridgeRefusal(OCCUPIED, str(occupied)) from occupied
        except BridgeConflict as conflict:
            raise BridgeRefusal(409, str(conflict)) from conflict
