"""Looks after a bridge between the trainer's calls: nobody else would notice a trainer that has
ended or fallen silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from vllm_patching.protocol.verification import BridgeRefusal, rank_name
from vllm_patching.protocol.writers import Writer
from vllm_patching.server.ranks import RankCalls
from vllm_patching.server.settlement import Settlement
from vllm_patching.server.state import BridgeState
from vllm_patching.server.turns import Turns
from vllm_patching.server.update_clock import UpdateClock

logger = logging.getLogger("vllm.lockstep.bridge")

WATCH_SECONDS = 0.5
_ENDING_SECONDS = 0.2


class BridgeWatchdog:
    """Gives up an update whose trainer has ended or is silent, or whose worker has lost it; decides
    what was left undecided.

    It outlives its own errors. Should it end all the same, `has_ended` says so, and no update may
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
            lock: held by whoever changes the state; while a call of the trainer's is under way,
                that one watches.
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
        """Whether it was started and does not look any more."""
        return self._task is not None and self._task.done()

    def follow(self, writers: Sequence[Writer]) -> None:
        """The processes of the present trainer that can be seen from here: with one of them its
        update has ended.
        """
        self._writers = writers

    def start(self) -> None:
        """Begin. Call from within the event loop."""
        self._task = asyncio.create_task(self._watch(), name="bridge watchdog")
        self._task.add_done_callback(self._note_end)

    async def stop(self) -> None:
        """End it."""
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
            if not self._state.in_update:
                await self._turns.look()
            if self._state.in_update:
                if self._clock.is_late:
                    silent = f"nothing from {self._state.trainer} for {self._clock.timeout:g} s"
                    await self._settlement.give_up(silent, trainer_silent=True)
                elif reason := await self._lost():
                    await self._settlement.give_up(reason)
                return
            if self._ranks.are_joining:
                with suppress(BridgeRefusal):  # whoever begins an update with them is told
                    await self._ranks.statuses()
            if not self._state.healthy:
                await self._settlement.look_again()
            else:
                await self._note_first_step()
        except BridgeRefusal as refusal:
            await self._settlement.give_up(
                str(refusal)
            )  # of an update whose workers do not even answer
        except Exception as error:  # noqa: BLE001 - told and outlived
            await self._survive(error)

    async def _survive(self, error: Exception) -> None:
        """An error of our own: an update that cannot be watched over is given up."""
        told = f"the bridge's watchdog failed: {error!r}"
        if told != self._said:
            logger.exception("[Bridge] %s; it goes on", told)
        self._said = told
        if self._state.in_update:
            self._state.fail(told, weights_intact=False, undecided=told)
            await self._settlement.stand_still()

    async def _lost(self) -> str:
        """Why the update cannot end well; empty while it can."""
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
        """That the trainer's processes have, or one of them; empty if none has, as far as can be
        seen here.
        """
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
            ):  # that the engine is dead or stuck is told by whatever needs it
                self._clock.stepped(await self._ranks.first_step())

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if self._task is None:
            return  # it was stopped
        self.end = "cancelled" if task.cancelled() else repr(task.exception())
        logger.error(
            "[Bridge] the watchdog has ended, updates are refused from now on: %s", self.end
        )
