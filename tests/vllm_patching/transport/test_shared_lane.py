"""A sender's memory, as others open it: the right one or none, and nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from vllm_patching.transport import lane
from vllm_patching.transport.lane import OfferedMemory, SendMemory

SENDER = """
import sys
from vllm_patching.transport.lane import SendMemory
memory = SendMemory([100, 100])
memory.buffers[1].fill_(7)
print(memory.offset_of(memory.buffers[1]), memory.offer, flush=True)
sys.stdin.read()
"""


def of_weights(folder: Path = Path("/dev/shm")) -> Sequence[Path]:
    return list(folder.glob("*lockstep-weights*"))


def test_what_a_killed_sender_had_ends_with_its_last_reader() -> None:
    """Another process's memory is read; when that process is killed none of it has a name, and no
    other program can open it.
    """
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert sender.stdout is not None
    start, _, offer = sender.stdout.readline().partition(" ")
    offered = OfferedMemory(offer)
    memory = offered.map()
    assert memory[int(start) : int(start) + 100].eq(7).all()
    sender.kill()
    sender.wait()
    assert memory[int(start) : int(start) + 100].eq(7).all(), "whoever reads it goes on"
    assert of_weights() == []
    with pytest.raises(OSError, match="No such file"):
        offered.map()


def test_memory_of_another_machine_sender_or_kind_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = SendMemory([10])
    told = json.loads(memory.offer)
    OfferedMemory(memory.offer)
    with open(tmp_path / "other", "w+b") as other:
        other.truncate(1 << 16)
        for changes, says in (
            ({"network": "net:[1]"}, "on another machine"),
            ({"nonce": "00" * 32}, "another sender's"),
            ({"num_bytes": 1 << 20}, "another sender's"),
            ({"path": f"/proc/{os.getpid()}/fd/{other.fileno()}"}, "another process's"),
        ):
            with pytest.raises(OSError, match=says):
                OfferedMemory(json.dumps(told | changes))
    with pytest.raises(OSError, match="on another machine"):
        OfferedMemory("")


def test_where_nothing_can_be_shared_the_buffers_are_there_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lane.os, "memfd_create", none)
    memory = SendMemory([10, 20])
    assert (memory.offer, [buffer.numel() for buffer in memory.buffers]) == ("", [10, 20])
    assert memory.offset_of(memory.buffers[1]) - memory.offset_of(memory.buffers[0]) == 16


def open_here(file: os.stat_result) -> int:
    """Return how many of this process's descriptors are of a file; others may come and go."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.path.samestat(entry.stat(), file)
    return found


def test_a_sender_gives_back_what_it_took() -> None:
    memory = SendMemory([1000])
    file = os.stat(json.loads(memory.offer)["path"])
    offered = OfferedMemory(memory.offer)
    assert torch.equal(offered.map()[-8:], torch.zeros(8, dtype=torch.uint8))
    assert open_here(file) == 1, "the reader's own is closed once it has mapped the memory"
    del memory
    assert open_here(file) == 0
    with pytest.raises(OSError, match=r"No such file|another process's"):
        offered.map()
