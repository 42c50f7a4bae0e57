"""example_trainer/weight_bridge/handshake.py: who sends to whom, and on which GPU."""

from __future__ import annotations

import pytest

from example_trainer.errors import BridgeError
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.handshake import ServerSession
from example_trainer.weight_bridge.server import BridgeServer
from vllm_patching.protocol.manifest import Manifest


def session_of(rank: int, world_size: int, gpus: list[str]) -> ServerSession:
    """A session with a server that has a rank on each of these GPUs; nothing is asked of anyone."""
    session = ServerSession(BridgeServer("localhost", 9001, timeout=1.0), 0, Ranks(rank, world_size))
    session.manifests = [Manifest(tp_rank=r, tp_size=len(gpus), entries=()) for r in range(len(gpus))]
    session.info = {"gpu_uuids": gpus}
    return session


def test_a_receiver_on_the_senders_gpu_is_refused_with_both_ways_out() -> None:
    with pytest.raises(BridgeError, match=r"vLLM rank 0 of http://localhost:9001.*\(GPU-a\).*--single-copy.*--device cuda:N"):
        session_of(0, 1, ["GPU-a"]).check_gpus("GPU-a")


@pytest.mark.parametrize(("rank", "own"), [(0, "GPU-b"), (1, "GPU-a")])
def test_another_senders_receiver_may_be_there(rank: int, own: str) -> None:
    session_of(rank, 2, ["GPU-a", "GPU-b"]).check_gpus(own)


@pytest.mark.parametrize(("rank", "own"), [(0, "GPU-a"), (1, "GPU-b")])
def test_each_rank_looks_at_its_own_receiver(rank: int, own: str) -> None:
    with pytest.raises(BridgeError, match=f"vLLM rank {rank} "):
        session_of(rank, 2, ["GPU-a", "GPU-b"]).check_gpus(own)


def test_a_single_sender_looks_at_all_of_them() -> None:
    with pytest.raises(BridgeError, match="vLLM rank 1 "):
        session_of(0, 1, ["GPU-a", "GPU-b"]).check_gpus("GPU-b")


def test_a_server_that_does_not_know_its_gpus_is_not_refused() -> None:
    session_of(0, 1, [""]).check_gpus("GPU-a")
