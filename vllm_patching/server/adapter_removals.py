"""Adapters that nobody uses any more, until every worker has said that it holds them no longer.

A removal may go without an answer: the engine is stalled, or a worker fails. Whether the adapter
still takes its place is then not known, so it counts as if it did and the workers are asked again
until they tell. An id is never used twice, so a removal that is carried out late, or twice, takes
nothing else away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("vllm.lockstep.lora")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 5.0


class AdapterRemovals:
    """Removes adapters in the background. Used on the event loop.

    Attributes:
        trouble: why the last try to remove the pending ones did not succeed; empty if none has
            failed.
    """

    def __init__(
        self, remove: Callable[[list[int]], Awaitable[list[list[int]]]], freed: Callable[[], None]
    ) -> None:
        """
        Args:
            remove: asks the workers to forget adapters; answers with those that each rank holds
                then. Has a deadline.
            freed: called when there is room again.
        """
        self._remove, self._freed = remove, freed
        self._pending: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self.trouble = ""

    @property
    def pending(self) -> list[int]:
        """Ids of the adapters that may still take a place."""
        return sorted(self._pending)

    def add(self, adapter_id: int) -> None:
        """Remove this one, or make sure that it is not there."""
        self._pending.add(adapter_id)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="LoRA removals")

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while self._pending:
            asked = self.pending
            try:
                held = {adapter_id for rank in await self._remove(asked) for adapter_id in rank}
                self._pending -= set(asked) - held
                if kept := held & set(asked):
                    raise RuntimeError(f"a worker still holds {sorted(kept)}")
            except Exception as error:  # noqa: BLE001  # whatever it is, the places must be found out about
                if not self.trouble:
                    logger.error(
                        "[LoRA] cannot tell whether adapters %s are removed: %s; asking again",
                        asked,
                        error,
                    )
                self.trouble = str(error) or type(error).__name__
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if self.trouble:
                logger.info("[LoRA] adapters %s are removed after all", asked)
            self.trouble, pause = "", _FIRST_PAUSE_SECONDS
            self._freed()
