"""vLLM's own log."""

from __future__ import annotations

import logging


def worker_logger(name: str) -> logging.Logger:
    """A logger whose lines appear in vLLM's own log, in the server and in every worker process.

    vLLM sets up the loggers below its name when it is imported, which need not be now.
    """
    return logging.getLogger(f"vllm.{name}")
