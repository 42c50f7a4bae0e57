"""Shared memory of vLLM's processes, named after the process that made it.

vLLM's message queues are segments of Python's SharedMemory, and its locks are semaphores: Python
names both at random. vLLM names a group of CPU workers at random. The name is in that of the file
by which they meet, and of the segments that its C++ code makes for them. If a process and its
resource tracker are killed, all of these stay, and their owner is not known.
"""

from __future__ import annotations

import importlib
import secrets
import sys
import tempfile
from multiprocessing import shared_memory
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

from vllm_patching.transport.shared_memory import SHM_DIR, owned_prefix, remove_leftovers

_GROUP_NAME = "get_file_store_init_method"
_GROUP_MODULES = (
    "vllm.utils.network_utils",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
)
"""The first defines the function, the others import it by name."""


class OwnedMemory(SharedMemory):
    """A SharedMemory that is named after the process that makes it."""

    def __init__(
        self, name: str | None = None, create: bool = False, size: int = 0, **more: Any
    ) -> None:
        if create and name is None:
            name = _owned_name("memory")
        super().__init__(name, create, size, **more)


def _owned_name(kind: str) -> str:
    return f"{owned_prefix()}{secrets.token_hex(8)}.{kind}"


def _semaphore_name() -> str:
    return "/" + _owned_name("semaphore")


def _group_file() -> str:
    return f"file://{tempfile.gettempdir()}/{_owned_name('group')}"


def install() -> None:
    """Remove files of ended processes. From now on, name after this process every SharedMemory and
    semaphore that it makes, and each group of vLLM's workers.
    """
    for folder in {SHM_DIR, Path(tempfile.gettempdir())}:
        remove_leftovers(folder)
    if shared_memory.SharedMemory is SharedMemory:
        shared_memory.SharedMemory = OwnedMemory  # type: ignore[misc]
    if SHM_DIR.is_dir():  # elsewhere names of semaphores may be too short for this
        SemLock._make_name = staticmethod(_semaphore_name)  # type: ignore[attr-defined]
    if "vllm" in sys.modules:
        importlib.import_module(_GROUP_MODULES[0])
    for module in filter(None, map(sys.modules.get, _GROUP_MODULES)):
        if hasattr(module, _GROUP_NAME):
            setattr(module, _GROUP_NAME, _group_file)
