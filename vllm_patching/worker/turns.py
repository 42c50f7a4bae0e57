"""Methods of a vLLM worker that takes turns with its trainer on one GPU, called on the worker's
main thread through collective_rpc.
"""

from __future__ import annotations

import os

from vllm_patching.compat.cache_memory import CacheMemory, pool_keys_and_values
from vllm_patching.compat.loggers import worker_logger
from vllm_patching.compat.versions import UnsupportedVllm
from vllm_patching.protocol.messages import CacheAnswer

logger = worker_logger("lockstep.turns")

VARIABLE = "LOCKSTEP_COLOCATE"
"""Set to 1 in the environment of the workers of a server with --colocate."""


def prepare_worker() -> None:
    """In a worker's process, before it makes its keys and values: have their memory be such that it
    can be given back. Does nothing in a server without --colocate, and on a CPU.

    Raises:
        UnsupportedVllm: this vLLM has no such memory.
    """
    from vllm.platforms import current_platform

    if os.environ.get(VARIABLE) == "1" and current_platform.is_cuda():
        pool_keys_and_values()


class TurnsWorkerExtension:
    """Mixed into vLLM's worker. Answers and no exceptions: vLLM would leave the other ranks'
    answers behind, for the next call to find.
    """

    def lockstep_cache_bytes(self) -> CacheAnswer:
        """Return the bytes of keys and values that this rank can give back; `error` has the reason
        if it cannot.
        """
        try:
            self._lockstep_cache = CacheMemory(self)
        except UnsupportedVllm as error:
            return self._lockstep_turn(0, str(error))
        return self._lockstep_turn(self._lockstep_cache.bytes)

    def lockstep_give_back(self) -> CacheAnswer:
        """Free the keys' and values' memory; `bytes` were freed by this call.

        No step may be in flight.
        """
        try:
            freed = self._lockstep_cache.give_back()
        except RuntimeError as error:
            return self._lockstep_turn(
                0, f"the keys' and values' memory cannot be given back: {error}"
            )
        logger.info("[Turns] %.2f GiB of keys and values given back", freed / 2**30)
        return self._lockstep_turn(freed)

    def lockstep_take_again(self) -> CacheAnswer:
        """Have the keys' and values' memory again, empty.

        `error` names bytes wanted and free where that cannot be.
        """
        error = self._lockstep_cache.take_again()
        if error:
            logger.error("[Turns] %s", error)
        return self._lockstep_turn(0 if error else self._lockstep_cache.bytes, error)

    def _lockstep_turn(self, size: int, error: str = "") -> CacheAnswer:
        return {"tp_rank": getattr(self, "_lockstep_rank", 0), "bytes": size, "error": error}
