"""vLLM's own reader of outputs, with an engine core that ends."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_patching.compat.loggers import stop_in_one_line


def made_engine(core: Any) -> Any:
    """Return vLLM's front end as far as its reader of outputs needs it."""
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.engine_core, engine.output_handler = core, None
    engine.output_processor = SimpleNamespace(propagate_error=lambda error: None)
    engine.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
    engine.log_stats, engine.logger_manager = False, None
    return engine


@pytest.mark.parametrize("ordered", [True, False], ids=["stop", "crash"])
def test_a_stop_is_one_line_and_a_crash_has_its_traceback(
    ordered: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("vllm.v1.engine.async_llm")
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    async def end() -> None:
        ended = asyncio.Event()
        core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
        core.shutdown = lambda timeout=None: ended.set()

        async def outputs() -> None:
            await ended.wait()
            raise EngineDeadError

        core.get_output_async = outputs
        engine = made_engine(core)
        stop_in_one_line(engine)
        engine._run_output_handler()
        reader = engine.output_handler
        await asyncio.sleep(0)  # it reads
        if ordered:
            monkeypatch.setattr(
                "vllm.v1.engine.async_llm.cancel_task_threadsafe", lambda task: None
            )
            engine.shutdown()
        else:
            core.resources.engine_dead = True
            ended.set()
        await reader
        engine.shutdown()

    with caplog.at_level(logging.INFO, log.name):
        asyncio.run(end())
    (record,) = [one for one in caplog.records if one.name == log.name]
    if ordered:
        assert (record.levelname, record.exc_info) == ("INFO", None)
        assert record.getMessage() == "The engine was stopped with the server"
    else:
        assert record.levelname == "ERROR"
        assert "EngineDeadError" in caplog.text
