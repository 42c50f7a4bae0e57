"""Segments of vLLM's message queues are opened by name, and each is removed by its owner."""

from __future__ import annotations

import copy
from multiprocessing import shared_memory
from multiprocessing.synchronize import SemLock

import pytest

from vllm_patching.engine_core import named_memory
from vllm_patching.engine_core.named_memory import OwnedMemory
from vllm_patching.transport.shared_memory import SHM_DIR

pytestmark = pytest.mark.skipif(not SHM_DIR.is_dir(), reason="no /dev/shm")


def test_it_is_opened_by_name_and_rebuilt_as_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SharedMemory", shared_memory.SharedMemory)
    monkeypatch.setattr(SemLock, "_make_name", staticmethod(SemLock._make_name))  # type: ignore[attr-defined]
    named_memory.install()
    named_memory.install()
    assert shared_memory.SharedMemory is OwnedMemory
    made = shared_memory.SharedMemory(create=True, size=64)
    assert made.buf is not None
    made.buf[:3] = b"abc"
    for other in (shared_memory.SharedMemory(made.name), copy.copy(made)):
        assert other.buf is not None
        assert (other.name, bytes(other.buf[:3])) == (made.name, b"abc")
        other.close()
    made.close()
    made.unlink()
