"""Messages between the processes of one vLLM server."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

_MODULE = "vllm.distributed.device_communicators.shm_broadcast"
COPIED_BY_ZMQ = 1 << 16
"""zmq copies a frame smaller than this as it is sent (zmq.COPY_THRESHOLD); a larger one it reads
where it lies, later."""


def wait_without_spinning() -> None:
    """Have a rank that waits for a message of another one on this host sleep until it is announced.

    For a second after each message vLLM's ranks look for the next one without a pause. So every
    process of a server takes a core while it waits. That is right beside GPUs; on a CPU those cores
    are what the others compute with. Both ways of waiting are vLLM's own: after that second it
    sleeps, too. Does nothing where vLLM waits in another way.
    """
    condition = getattr(importlib.import_module(_MODULE), "SpinCondition", None)
    if hasattr(condition, "record_read"):
        condition.record_read = _note_nothing  # type: ignore[union-attr]


def _note_nothing(condition: Any) -> None:
    """In place of the time of the last message, from which that second counts."""


def keep_payloads_whole(encoder: Any, process: Any) -> None:
    """Have no message of an engine core to its front end overwritten by the next one while it is
    being sent.

    vLLM encodes messages into buffers that it uses again, and asks zmq when one is free. vLLM 0.26
    asks that of a message's last frame. Where arrays go along in frames of their own, small ones,
    the answer is yes at once. But zmq then still reads a large payload from the buffer
    (https://github.com/vllm-project/vllm/pull/50053). The front end then takes tokens for other
    requests', or ends because it cannot read the message. Hundreds of requests whose outputs are
    sent together, as before a pause, make such messages. Here the payload is copied out of the
    buffer. Does nothing where vLLM asks of its frame.

    Args:
        encoder: the class that encodes, MsgpackEncoder.
        process: the class that sends, EngineCoreProc.
    """
    if hasattr(process, "_send_msg_tracking_payload") or hasattr(encoder, "lockstep_encode_into"):
        return
    encode: Callable[..., Sequence[Any]] = encoder.encode_into

    @functools.wraps(encode)
    def encode_and_copy(self: Any, message: Any, buffer: bytearray) -> Sequence[Any]:
        payload, *arrays = encode(self, message, buffer)
        return [bytes(payload) if arrays and len(payload) >= COPIED_BY_ZMQ else payload, *arrays]

    encoder.lockstep_encode_into, encoder.encode_into = encode, encode_and_copy
