"""How rank 0, which the trainer speaks with, asks the other shards: JSON over connections that only they can open.

Collectives would not do: the trainer asks at any time, also while the shards send to vLLM servers together.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from urllib.parse import urlsplit

from example_trainer.errors import BridgeError
from example_trainer.parallel.ranks import Ranks
from example_trainer.parameter_server.held import HeldWeights
from vllm_patching.transport.addresses import rendezvous_address

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0


class Shards:
    """All shards' receivers. Collective to make; `call` is rank 0's, and used by one thread.

    On the other ranks a thread answers.
    """

    def __init__(self, held: HeldWeights, ranks: Ranks) -> None:
        self._held, self._ranks = held, ranks
        self._others: list[Connection] = []
        self._ended = ""
        self._thread: threading.Thread | None = None
        if ranks.world_size == 1:
            return
        listener: list[Listener] = []

        def listen() -> list[str]:
            host, _ = rendezvous_address()
            key = secrets.token_hex(32)
            listener.append(Listener((host, 0), authkey=key.encode()))
            return [str(urlsplit(f"//{host}").hostname), str(listener[0].address[1]), key]

        host, port, key = ranks.on_main("opening the way to the shards", listen)
        if not ranks.is_main:
            connection = Client((host, int(port)), authkey=key.encode())
            connection.send_bytes(json.dumps(ranks.rank).encode())
            self._thread = threading.Thread(target=self._answer, args=(connection,), name="answers rank 0", daemon=True)
            self._thread.start()
        else:
            with listener[0]:
                found = [listener[0].accept() for _ in range(ranks.world_size - 1)]
            self._others = sorted(found, key=lambda one: int(json.loads(one.recv_bytes())))
        ranks.barrier("meeting the shards")

    def call(self, method: str, args: Sequence[Any]) -> list[Any]:
        """A method of every shard's receiver; their answers by rank.

        Raises:
            RuntimeError: one failed, has ended, or did not answer.
        """
        for other in self._others:
            other.send_bytes(json.dumps([method, list(args)]).encode())
        answers = [getattr(self._held, method)(*args)]
        errors = []
        for rank, other in enumerate(self._others, 1):
            if not other.poll(ANSWER_SECONDS):
                self._ended = f"shard {rank} did not answer {method} within {ANSWER_SECONDS:g} s"
                raise RuntimeError(self._ended)  # its answer would be taken for that to the next question
            try:
                told = json.loads(other.recv_bytes())
            except (EOFError, OSError) as error:
                self._ended = f"shard {rank} has ended"
                raise RuntimeError(self._ended) from error
            answers.append(told.get("answer"))
            errors += [f"shard {rank}: {told['error']}"] if "error" in told else []
        if errors:
            raise RuntimeError("; ".join(errors))
        return answers

    def check(self) -> None:
        """Raise BridgeError if the shards cannot go on together."""
        if self._ended:
            raise BridgeError(f"{self._ended}; start all shards again, they take the trainer's next push")

    def _answer(self, connection: Connection) -> None:
        try:
            while True:
                method, args = json.loads(connection.recv_bytes())
                try:
                    told = {"answer": getattr(self._held, method)(*args)}
                except Exception as error:
                    logger.exception("[ParameterServer] %s failed", method)
                    told = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
                connection.send_bytes(json.dumps(told).encode())
        except (EOFError, OSError, ValueError) as error:
            self._ended = f"shard 0 has ended ({type(error).__name__})"
