"""vLLM's own log."""

from __future__ import annotations

import logging
from typing import Any

from vllm_patching.compat.engine import engine_is_dead
from vllm_patching.compat.versions import seam


def worker_logger(name: str) -> logging.Logger:
    """A logger whose lines appear in vLLM's own log, in the server and in every worker process.

    vLLM sets up the loggers below its name when it is imported, which need not be now.
    """
    return logging.getLogger(f"vllm.{name}")


def stop_in_one_line(engine: Any) -> None:
    """Log the end of an engine's outputs as one plain line where the server stops its engine.

    vLLM then logs EngineDeadError with a traceback, as after a crash. An engine that has died
    before the stop keeps both.
    """
    log, shutdown = logging.getLogger("vllm.v1.engine.async_llm"), seam(engine, "shutdown")

    def plain(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__name__ == "EngineDeadError":
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = "The engine was stopped with the server", ()
            record.exc_info = record.exc_text = None
        return True

    def stop(*args: Any, **kwargs: Any) -> Any:
        if not engine_is_dead(engine):
            log.addFilter(plain)
        return shutdown(*args, **kwargs)

    engine.shutdown = stop
