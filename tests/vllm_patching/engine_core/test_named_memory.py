"""Segments of vLLM's message queues: the next one that is made removes segments of killed processes."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from vllm_patching.engine_core import named_memory
from vllm_patching.engine_core.named_memory import OwnedMemory
from vllm_patching.transport.shared_memory import SHM_DIR

ROOT = Path(__file__).resolve().parents[3]

MAKE = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
from vllm_patching.engine_core import named_memory
named_memory.install()
memory = shared_memory.SharedMemory(create=True, size=64)
print(memory.name, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(not SHM_DIR.is_dir(), reason="no /dev/shm")


def test_the_segment_of_a_process_killed_with_its_tracker_goes_with_the_next_one() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKE], cwd=ROOT, stdout=subprocess.PIPE) as maker:
        assert maker.stdout
        name, tracker = maker.stdout.readline().decode().split()
        beside = OwnedMemory(create=True, size=64)  # its owner runs: this leaves the other alone
        assert (SHM_DIR / name).exists()
        subprocess.run(["kill", "-9", tracker], check=True)
        maker.send_signal(signal.SIGKILL)
    after = OwnedMemory(create=True, size=64)
    assert not (SHM_DIR / name).exists()
    for memory in (beside, after):
        assert (SHM_DIR / memory.name).exists()
        memory.close()
        memory.unlink()


def test_it_is_opened_by_name_and_rebuilt_as_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SharedMemory", shared_memory.SharedMemory)
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
