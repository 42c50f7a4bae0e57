"""What the bridge asks of vLLM's engine, for a process that holds weights and samples nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from vllm_patching.engine_core.extension import verify_and_resume
from vllm_patching.protocol.messages import CAN_VERIFY_AND_RESUME

Call = Callable[[str, Sequence[Any]], list[Any]]
"""Calls a method of every rank's receiver with these arguments; one answer of each, by rank."""


class StillEngine:
    """Stands where the bridge expects vLLM's AsyncLLM. Ranks do one thing at a time, in the order
    in which they are asked.

    Attributes:
        errored: whether nothing can be asked of the ranks any more.
    """

    def __init__(self, call: Call, verified: Callable[[], None] = lambda: None) -> None:
        """Call from within the event loop.

        Args:
            call: asks the ranks; blocks.
            verified: called when all ranks have shown the checksums that the trainer has told, in
                the same thread as `call`.
        """
        self.errored = False
        self.engine_core = self
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._nothing)
        self.output_processor = SimpleNamespace(
            request_states={}, add_request=None, process_outputs=None
        )
        self._call, self._verified = call, verified
        self._main = ThreadPoolExecutor(1, "receiver")

    def ask(self, method: str, *args: Any, seconds: float) -> list[Any]:
        """As `collective_rpc`, for another thread. Raises TimeoutError."""
        return self._main.submit(self._call, method, args).result(seconds)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        """The answers of all ranks."""
        return await self.on_main(self._call, method, args)

    async def on_main(self, work: Callable[..., Any], *args: Any) -> Any:
        """Work that takes its turn with what is asked of the ranks."""
        return await asyncio.get_running_loop().run_in_executor(self._main, work, *args)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """Nothing runs that could be paused."""
        await self.on_main(int)  # behind what is under way

    async def resume_generation(self) -> None:
        """Nothing was paused."""

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """What the engine core's plugin adds: see verify_and_resume."""
        if method == CAN_VERIFY_AND_RESUME:
            return True
        core = SimpleNamespace(
            collective_rpc=lambda name: self._call(name, ()), resume_scheduler=self._verified
        )
        return await self.on_main(verify_and_resume, core, *args)

    async def get_output_async(self) -> Any:
        """There is never any."""
        await asyncio.Event().wait()

    async def _nothing(self) -> None:
        return None
