"""Calls of rank 0 on the other shards: lines of JSON over connections that only the shards can
open.

Collectives would not do: the trainer asks at any time, also while the shards send to vLLM servers
together.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from example_trainer.errors import BridgeError, RankError
from example_trainer.parallel.ranks import Ranks
from example_trainer.parameter_server.held import HeldWeights
from vllm_patching.transport.addresses import is_loopback, rendezvous_address

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
HELLO_SECONDS = 5.0
"""Limit for a stranger to keep the shards from being met."""
LOOK_SECONDS = 1.0
MARGIN_SECONDS = 30.0
"""The others wait so much longer than rank 0, whose message is the better one."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 20, socket.TCP_KEEPCNT: 6}
"""A shard waits for the next question as long as rank 0's machine answers the kernel."""


class Wire:
    """One connection. Takes the socket over."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket, self._lines = connection, connection.makefile("rb")

    def tell(self, value: Any, seconds: float = ANSWER_SECONDS) -> None:
        """Send a JSON value. Raises OSError."""
        self._socket.settimeout(seconds)
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def hear(self, seconds: float | None, most: int = -1) -> Any:
        """Receive one.

        Args:
            seconds: the deadline; None: for as long as the other side is there.
            most: bytes that it may have; -1: any number.

        Raises:
            OSError: the other side has ended; TimeoutError if it is silent.
            ValueError: the line is not JSON.
        """
        self._socket.settimeout(seconds)
        line = self._lines.readline(most)
        if not line:
            raise ConnectionResetError("the connection is closed")
        return json.loads(line)

    def close(self) -> None:
        """Hang up."""
        self._lines.close()
        self._socket.close()


class Shards:
    """All shards' receivers. Collective to make; `call` is rank 0's, and used by one thread.

    On the other ranks a thread answers.

    Raises:
        BridgeError: they did not meet within the ranks' timeout. The message names the shard and
            the place.
        RankError: one failed before.
    """

    def __init__(self, held: HeldWeights, ranks: Ranks) -> None:
        self._held, self._ranks = held, ranks
        self._others: list[Wire] = []
        self._ended = ""
        self._thread: threading.Thread | None = None
        if ranks.world_size == 1:
            return
        listening: list[socket.socket] = []

        def listen() -> list[str]:
            host, _ = rendezvous_address()
            # A machine's own name often means 127.0.1.1 there, where no other machine comes.
            listening.append(socket.create_server(("127.0.0.1" if is_loopback(host) else "", 0)))
            return [
                str(urlsplit(f"//{host}").hostname),
                str(listening[0].getsockname()[1]),
                secrets.token_hex(32),
            ]

        host, port, key = ranks.on_main("opening the way to the shards", listen)
        if ranks.is_main:
            with listening[0]:
                self._others = meet(listening[0], f"{host}:{port}", key, ranks)
        else:
            wire = come(host, int(port), key, ranks)
            self._thread = threading.Thread(
                target=self._answer, args=(wire,), name="answers rank 0", daemon=True
            )
            self._thread.start()
        ranks.barrier("meeting the shards", ranks.timeout + MARGIN_SECONDS)

    def call(self, method: str, args: Sequence[Any]) -> list[Any]:
        """A method of every shard's receiver; their answers by rank.

        Raises:
            RuntimeError: one failed, has ended, or did not answer.
        """
        if self._ended:  # an answer to an earlier question may still be on its way
            raise RuntimeError(self._ended)
        for rank, other in enumerate(self._others, 1):
            try:
                other.tell([method, list(args)])
            except OSError as error:
                raise self._lost(rank, method, error) from error
        failed: Exception | None = None
        try:
            answers = [getattr(self._held, method)(*args)]
        except Exception as error:  # noqa: BLE001 - raised below, when the others have answered
            failed = error
            answers = [None]
        errors = []
        for rank, other in enumerate(self._others, 1):
            try:
                answer = other.hear(ANSWER_SECONDS)
            except (OSError, ValueError) as error:
                raise self._lost(rank, method, error) from error
            answers.append(answer.get("answer"))
            if "error" in answer:
                errors.append(f"shard {rank}: {answer['error']}")
        if failed is not None:
            raise failed
        if errors:
            raise RuntimeError("; ".join(errors))
        return answers

    def check(self) -> None:
        """Raise BridgeError if the shards cannot go on together."""
        if self._ended:
            raise BridgeError(
                f"{self._ended}; start all shards again, they take the trainer's next push"
            )

    def _lost(self, rank: int, method: str, error: Exception) -> RuntimeError:
        self._ended = f"shard {rank} has ended"
        if isinstance(error, TimeoutError):
            self._ended = f"shard {rank} did not answer {method} within {ANSWER_SECONDS:g} s"
        return RuntimeError(self._ended)

    def _answer(self, wire: Wire) -> None:
        try:
            while True:
                method, args = wire.hear(None)
                try:
                    answer = {"answer": getattr(self._held, method)(*args)}
                except Exception as error:
                    logger.exception("[ParameterServer] %s failed", method)
                    answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
                wire.tell(answer)
        except Exception as error:  # noqa: BLE001 - raised in `check`
            self._ended = f"shard 0 has ended ({type(error).__name__})"


def meet(listening: socket.socket, place: str, key: str, ranks: Ranks) -> list[Wire]:
    """On rank 0: the connections of the others, in their order.

    Args:
        listening: where they come.
        place: how it is called, for messages.
        key: the shards send it with their rank; other callers are refused.

    Raises:
        BridgeError: not all came within the ranks' timeout.
        RankError: one of them failed.
    """
    deadline = time.monotonic() + ranks.timeout
    came: dict[int, Wire] = {}
    while missing := [rank for rank in range(1, ranks.world_size) if rank not in came]:
        who = f"shards {missing} of {ranks.world_size}"
        if len(missing) == 1:
            who = f"shard {missing[0]} of {ranks.world_size}"
        left = deadline - time.monotonic()
        listening.settimeout(
            min(max(left, 0.01), LOOK_SECONDS)
        )  # who is there already is let in, however late it is
        try:
            connection, (caller, *_) = listening.accept()
        except TimeoutError:
            if reason := ranks.reason_of_another(seconds=0):
                raise RankError(f"shard 0 gave up waiting for {who} at {place}: {reason}") from None
            if left > 0:
                continue
            raise BridgeError(
                f"{who} did not come to {place} within {ranks.timeout:g} s (--rank-timeout). See "
                "what became of it where it runs. See that this address is reached from there "
                "(MASTER_ADDR names another), then start all shards again"
            ) from None
        wire = Wire(connection)
        try:
            rank, sent_key = wire.hear(HELLO_SECONDS, 1000)
            is_shard = hmac.compare_digest(str(sent_key), key) and rank in missing
        except (OSError, ValueError, TypeError):
            is_shard = False
        if is_shard:
            came[rank] = wire
        else:
            logger.warning(
                "[ParameterServer] a program at %s came to %s that is not a shard of this one",
                caller,
                place,
            )
            wire.close()
    return [came[rank] for rank in sorted(came)]


def come(host: str, port: int, key: str, ranks: Ranks) -> Wire:
    """On another rank: the connection to rank 0. Raises BridgeError if it cannot be had."""
    try:
        wire = Wire(socket.create_connection((host, port), ranks.timeout))
        wire.tell([ranks.rank, key])
    except OSError as error:
        raise BridgeError(
            f"shard {ranks.rank} of {ranks.world_size} on {socket.gethostname()} does not reach "
            f"shard 0 at {host}:{port}: {error}. See that its firewall lets this machine in, or "
            "set MASTER_ADDR to another address of that machine"
        ) from error
    return wire
