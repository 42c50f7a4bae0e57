"""Segments that killed processes leave in shared memory go when the next process makes some."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_patching.transport.shared_memory import SHM_DIR

ROOT = Path(__file__).resolve().parents[3]

MAKE = """
import multiprocessing, time
from multiprocessing import resource_tracker, shared_memory
import vllm.v1.executor.uniproc_executor as executor
from vllm_patching.engine_core import named_memory
named_memory.install()
memory = shared_memory.SharedMemory(create=True, size=64)
lock = multiprocessing.get_context("spawn").Lock()
group = executor.get_file_store_init_method().removeprefix("file://")
open(group, "x").close()
segment = "/dev/shm/" + group.rpartition("/")[2] + "-tp-[0-1]-cpushm_0"  # as vLLM's C++ code makes it
open(segment, "x").close()
names = ["/dev/shm/" + memory.name, "/dev/shm/sem." + lock._semlock.name[1:], group, segment]
print(resource_tracker._resource_tracker._pid, *names, flush=True)
time.sleep(600)
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not SHM_DIR.is_dir(), reason="no /dev/shm"),
]


@contextmanager
def maker() -> Iterator[tuple[subprocess.Popen[bytes], int, list[Path]]]:
    """A process that has made one file of each kind: it, its resource tracker, and the files."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKE], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        tracker, *paths = process.stdout.readline().decode().split()
        yield process, int(tracker), [Path(path) for path in paths]
        process.kill()


def test_what_killed_processes_leave_goes_when_the_next_one_starts() -> None:
    with maker() as (process, tracker, left), maker() as (_, _, beside):
        assert len(left) == 4
        assert all(path.exists() for path in left)
        os.kill(tracker, signal.SIGKILL)
        process.kill()
        process.wait()
        with maker():
            assert not any(path.exists() for path in left)
            assert all(path.exists() for path in beside), "their owner runs"
