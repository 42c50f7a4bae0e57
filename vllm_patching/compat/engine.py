"""Commands to vLLM's engine cores, and what is known of them.

A server has one engine core, or several with `--data-parallel-size`: replicas of the model, each
with ranks, a scheduler and requests of its own. vLLM's commands to pause and to go on reach all of
them and wait for all. For its other calls only the first replica's answer is handed on. So the
replicas are asked one by one here, all at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from vllm_patching.compat.versions import SUPPORTED, UnsupportedVllm, seam, vllm_version


def replicas(engine: Any) -> int:
    """Return the number of the server's engine cores."""
    return len(_cores(engine)) or 1


def memory_share(engine: Any) -> float | None:
    """The server's --gpu-memory-utilization; None if another flag decides how much memory it takes,
    or it takes none.
    """
    cache = getattr(getattr(engine, "vllm_config", None), "cache_config", None)
    if cache is None or getattr(cache, "kv_cache_memory_bytes", None):
        return None
    return float(cache.gpu_memory_utilization)


def replica_of(vllm_config: Any) -> int:
    """Which replica of its server a worker belongs to, from 0.

    Args:
        vllm_config: the worker's, in which vLLM leaves this number when it makes a replica of a
            dense model independent.
    """
    return int(vllm_config.parallel_config.data_parallel_index)


def require_commands(engine: Any) -> None:
    """Raise UnsupportedVllm unless the engine can be called, be paused and go on as updates need it.

    Updates call these names without another check.
    """
    seam(engine.engine_core, "pause_scheduler_async")
    seam(engine.engine_core, _name_of_call(engine))
    seam(engine, "collective_rpc")
    seam(engine.renderer, "clear_mm_cache_async")
    seam(engine, "resume_generation")


async def pause_and_keep(engine: Any, clear_cache: bool) -> None:
    """Stop scheduling and keep the requests; returns when no step is in flight, in any replica.

    vLLM's own pause_generation does the same and then sleeps for 20 ms, so that outputs reach their
    callers first. Ours may reach them later, see follow_outputs.

    Args:
        clear_cache: drop every cached key and value; running requests compute theirs again when
            they go on.
    """
    if clear_cache:
        # The front end's and the engine's caches of processed images must be emptied together.
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


def ask_engine_cores(engine: Any, method: str, *args: Any) -> list[Awaitable[Any]]:
    """Call a method of every engine core, as vLLM's own calls to it do.

    Returns:
        for each replica, what its answer is awaited with; nothing is sent before. Awaiting raises
        UnsupportedVllm if the engine core has no such method.
    """
    call, cores = getattr(engine.engine_core, _name_of_call(engine)), _cores(engine)
    if len(cores) > 1:
        return [_known(call(method, *args, engine=core), method) for core in cores]
    return [_known(call(method, *args), method)]


async def ask_workers(engine: Any, method: str, args: tuple[Any, ...]) -> list[list[Any]]:
    """Call a method of every worker on its main thread: for each replica, the answers of its ranks."""
    if replicas(engine) == 1:
        return [list(await engine.collective_rpc(method, args=args))]
    # As AsyncMPClient.collective_rpc_async: method, timeout, args, kwargs.
    asked = ask_engine_cores(engine, "collective_rpc", method, None, args, None)
    return [list(answers) for answers in await asyncio.gather(*asked)]


async def _known(answer: Awaitable[Any], method: str) -> Any:
    try:
        return await answer
    except Exception as error:
        if f"no attribute '{method}'" in str(error):
            raise UnsupportedVllm(
                f"vLLM ({vllm_version()}) has not loaded the plugin of "
                f"vllm_patching/engine_core/plugin, which gives its engine core {method}. Is the "
                f"version {SUPPORTED}, and does nothing take that folder out of PYTHONPATH?"
            ) from error
        raise


def _name_of_call(engine: Any) -> str:
    """The client's method that calls a named replica, or the only one."""
    return "_call_utility_async" if len(_cores(engine)) > 1 else "call_utility_async"


def _cores(engine: Any) -> list[Any]:
    return list(getattr(engine.engine_core, "core_engines", ()))


def engine_is_dead(engine: Any) -> bool:
    """Return whether a process of the engine's has ended: with one replica vLLM ends all of
    them."""
    return bool(engine.errored)
