"""What becomes of the weights and of the engine when an update has failed."""

from __future__ import annotations

import logging
import time

from vllm_patching.protocol.lease import Leases
from vllm_patching.protocol.verification import BridgeRefusal
from vllm_patching.protocol.workers import BridgeWorker
from vllm_patching.server.engine_switch import EngineSwitch
from vllm_patching.server.ranks import RankCalls
from vllm_patching.server.state import BridgeState

logger = logging.getLogger("vllm.lockstep.bridge")

LET_GO_SECONDS = 2.0
"""How long a worker's updater thread is given to let go of what it writes to."""


class Settlement:
    """Ends updates that failed: the engine goes on with the old version if its weights are proven
    to be whole, else it stands still. Call with the controller's lock held.

    Whole means two things at once: nobody may write them (see lease), and their checksums are those
    of the version served. While one of both is not known yet, the server is unhealthy and
    undecided, and `look_again` can still find that all is well.
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
                "[Bridge] Nobody can write the weights any more, and they are still those of version %d: serving version %d",
                *[self._state.weight_version] * 2,
            )
        else:
            logger.error(
                "[Bridge] The weights are not whole, as is known now: UNHEALTHY until a full update succeeds"
            )

    async def require_no_writer(self, timeout: float) -> None:
        """Return when nobody may write the weights under an earlier update. The server's own
        threads are waited for.

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
                raise BridgeRefusal(409, f"nobody else may write the weights now: {lease.remedy}")

    async def stand_still(self) -> None:
        """See that the engine stands still.

        If it does not answer, `look_again` tries anew; the same reason is told once.
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
        """Whether the live weights are those of the version served and nobody may write them; and
        if that cannot be known now, why not.
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
        """Whether no lease is out; one whose holder is known to be done ends here."""
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
