"""Messages between the processes of one vLLM server."""

from __future__ import annotations

import importlib
from typing import Any

_MODULE = "vllm.distributed.device_communicators.shm_broadcast"


def wait_without_spinning() -> None:
    """Have whoever waits for a message from another rank on this host sleep until it is announced.

    For a second after each message vLLM's ranks look for the next one without a pause, so that every process of a server takes
    a core while it waits. That is right beside GPUs; on a CPU those cores are what the others compute with. Both ways of
    waiting are vLLM's own: after that second it sleeps, too. Does nothing where vLLM waits in another way.
    """
    condition = getattr(importlib.import_module(_MODULE), "SpinCondition", None)
    if hasattr(condition, "record_read"):
        condition.record_read = _note_nothing  # type: ignore[union-attr]


def _note_nothing(condition: Any) -> None:
    """In place of the time of the last message, from which that second counts."""
