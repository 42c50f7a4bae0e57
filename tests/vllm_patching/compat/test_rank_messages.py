"""vLLM's ranks on a CPU, which take no core while they wait for one another; an engine core's
messages, which stay whole.
"""

from __future__ import annotations

import sys

import pytest

from tests.forked_commands import run_command

pytestmark = pytest.mark.nightly

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


MESSAGES = """
import numpy, zmq
from vllm.v1.serial_utils import MsgpackEncoder
from vllm_patching.compat.rank_messages import keep_payloads_whole

class Sender:
    "vLLM 0.26's EngineCoreProc: it asks of the last frame when the buffer is free."

rows = numpy.zeros(200)
assert rows.nbytes < 1 << 16

def received(tokens):
    "Two messages in one buffer, of which the second is encoded before the first is read; whether each arrives as it was sent."
    with zmq.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as front_end:
        out.bind("inproc://outputs")
        front_end.connect("inproc://outputs")
        encoder, buffer, sent = MsgpackEncoder(), bytearray(), []
        for first in (0, 7):
            frames = encoder.encode_into({"tokens": list(range(first, first + tokens)), "rows": rows}, buffer)
            assert len(frames) == 2
            sent.append(bytes(frames[0]))
            assert out.send_multipart(frames, copy=False, track=True).done, "so that the buffer counts as free"
        return [front_end.recv_multipart()[0] == payload for payload in sent]

assert received(100) == [True, True]
assert received(50_000) == [False, True]
keep_payloads_whole(MsgpackEncoder, type("Cured", (), {"_send_msg_tracking_payload": None}))
assert received(50_000) == [False, True], "nothing is done where vLLM cares for it"
keep_payloads_whole(MsgpackEncoder, Sender)
keep_payloads_whole(MsgpackEncoder, Sender)
assert received(100) == received(50_000) == [True, True]
print("whole")
"""


def test_a_message_is_not_overwritten_by_the_next_while_it_is_sent() -> None:
    done = run_command([sys.executable, "-c", MESSAGES], program="vllm")
    assert done.returncode == 0, done.stdout
    assert "whole" in done.stdout
