"""vLLM's ranks on a CPU, which take no core while they wait for one another."""

from __future__ import annotations

import sys

from tests.forked_commands import run_command

PROGRAM = """
import threading
from vllm.distributed.device_communicators import shm_broadcast
from vllm_patching.compat.rank_messages import wait_without_spinning

looks = []
shm_broadcast.sched_yield = lambda: looks.append("again")
wait_without_spinning()
writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=2)
reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
meeting = threading.Thread(target=writer.wait_until_ready)
meeting.start()
reader.wait_until_ready()
meeting.join()
reader._spin_condition.last_read = 0.0  # as if it had been made long ago
for number in range(5):
    threading.Timer(0.05, writer.enqueue, [number]).start()
    assert reader.dequeue(timeout=60) == number
print("looked", len(looks), "times")
"""


def test_a_rank_that_has_just_got_a_message_sleeps_until_the_next() -> None:
    done = run_command([sys.executable, "-c", PROGRAM], program="vllm")
    assert done.returncode == 0, done.stdout
    assert "looked 0 times" in done.stdout
