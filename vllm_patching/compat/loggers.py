"""vLLM's own log."""

from __future__ import annotations

import importlib
import logging


def worker_logger(name: str) -> logging.Logger:
    """A logger whose lines appear in vLLM's own log, in the server and in every worker process."""
    logger: logging.Logger = importlib.import_module("vllm.logger").init_logger(f"vllm.{name}")
    return logger
