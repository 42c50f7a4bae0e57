"""Commands to vLLM's engine cores, and what is known of them."""

from __future__ import annotations

from typing import Any

from vllm_patching.compat.versions import SUPPORTED, UnsupportedVllm, seam_missing, vllm_version


async def pause_and_keep(engine: Any, clear_cache: bool) -> None:
    """Stop scheduling and keep the requests; returns when no step is in flight.

    vLLM's own pause_generation does the same and then sleeps for 20 ms, so that outputs reach their callers first; ours may
    reach them later, see follow_outputs.

    Args:
        clear_cache: drop every cached key and value; running requests compute theirs anew when they go on.
    """
    if clear_cache:
        # The front end's and the engine's caches of processed images must be emptied together.
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


async def ask_engine_core(engine: Any, method: str, *args: Any) -> Any:
    """Call a method of the engine core, as vLLM's own calls to it do.

    Raises:
        UnsupportedVllm: it has no such method, or there is no such way to call one.
    """
    client = engine.engine_core
    if not hasattr(client, "call_utility_async"):
        raise UnsupportedVllm(seam_missing("EngineCoreClient.call_utility_async"))
    try:
        return await client.call_utility_async(method, *args)
    except Exception as error:
        if f"no attribute '{method}'" in str(error):
            raise UnsupportedVllm(
                f"vLLM ({vllm_version()}) has not loaded the plugin of vllm_patching/engine_core/plugin, which gives its "
                f"engine core {method}: is the version {SUPPORTED}, and does nothing take that folder out of PYTHONPATH?"
            ) from error
        raise


def engine_is_dead(engine: Any) -> bool:
    """Whether the engine's process has ended."""
    return bool(engine.errored)
