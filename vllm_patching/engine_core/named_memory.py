"""Shared memory of vLLM's processes, named after the process that made it.

vLLM's message queues are segments of Python's SharedMemory, which names them at random. Python's
resource tracker removes them after their process. If both are killed, the segments stay, and
their owner is not known.
"""

from __future__ import annotations

import secrets
from multiprocessing import shared_memory
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from vllm_patching.transport.shared_memory import owned_prefix, remove_leftovers


class OwnedMemory(SharedMemory):
    """A SharedMemory that is named after the process that makes it. Before that, it removes
    the segments of ended processes.
    """

    def __init__(
        self, name: str | None = None, create: bool = False, size: int = 0, **more: Any
    ) -> None:
        if create and name is None:
            remove_leftovers()
            name = f"{owned_prefix()}{secrets.token_hex(8)}.memory"
        super().__init__(name, create, size, **more)


def install() -> None:
    """Have every SharedMemory that this process makes from now on be an OwnedMemory."""
    if shared_memory.SharedMemory is SharedMemory:
        shared_memory.SharedMemory = OwnedMemory  # type: ignore[misc]
