"""Taking turns with vLLM on one GPU (`--colocate`): the trainer's calls before it computes, and
after.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from example_trainer.errors import BridgeError, TrainerError
from example_trainer.parallel.ranks import Ranks
from example_trainer.vllm_client import ServerRefused
from example_trainer.weight_bridge.server import BridgeServer, timed

logger = logging.getLogger(__name__)

NO_MEMORY = 507
"""The HTTP status of a server that could not take its memory again; it tries on, and so does the
trainer."""
_RETRY_SECONDS = 0.5


class Turns:
    """The trainer's turns on a GPU that it shares with one vLLM server. Collective, as the bridge
    that has it.

    Example:
        with turns.taken(lambda: bridge.epoch, bridge.join_again):
            ...                     # vLLM's keys and values are gone, and their memory is there for gradients and activations
    """

    def __init__(self, server: BridgeServer, ranks: Ranks) -> None:
        """
        Args:
            server: what rank 0 asks.
            ranks: the trainer's processes.
        """
        self._server, self._ranks = server, ranks
        self.figures: dict[str, float] = {}
        """Figures of the last turn: `seconds` of all of it, in which no client got a token. Parts
        of them: `rest` and `wake`, until the server had answered. `freed_bytes` is what vLLM gave,
        over all ranks.
        """

    @contextmanager
    def taken(self, epoch: Callable[[], int], join_again: Callable[[], None]) -> Iterator[None]:
        """The trainer's turn. However the block ends, the server is asked to sample again.

        Args:
            epoch: the bridge's, which changes when a server was joined again.
            join_again: gives a server that was restarted the present weights.

        Raises:
            BridgeError: the server does not rest, or cannot sample again within its deadline.
        """
        begun, figures = time.perf_counter(), {"freed_bytes": 0.0}
        with timed(figures, "rest"):
            figures["freed_bytes"] = self._rest(epoch, join_again)
        try:
            yield
        except BaseException:
            self._wake_if_possible(epoch)
            raise
        with timed(figures, "wake"):
            self._wake(epoch)
        figures["seconds"] = time.perf_counter() - begun
        self.figures = figures

    def _rest(self, epoch: Callable[[], int], join_again: Callable[[], None]) -> float:
        try:
            return self._ask("rest", epoch())
        except BridgeError as error:
            self._wake_if_possible(epoch)  # it may have begun to rest, and its answer was lost
            if not self._restarted(error):
                raise
        join_again()
        return self._ask("rest", epoch())

    def _wake(self, epoch: Callable[[], int]) -> None:
        self._ranks.together("giving memory back to the GPU", release_memory)
        try:
            self._ranks.on_main(
                "ending the trainer's turn",
                lambda: self._wake_in_time(epoch()),
                3 * self._server.longest_wait,
            )
        except BridgeError as error:
            if not self._restarted(error):
                raise
            logger.warning(
                "[Turns] %s was restarted in the trainer's turn; it samples", self._server.url
            )

    def _wake_in_time(self, epoch: int) -> None:
        """On rank 0: ask until the server has its memory, or its time for a step of an update is
        over.
        """
        deadline, said = time.monotonic() + self._server.timeout, False
        while True:
            try:
                self._call("wake", epoch)
                return
            except ServerRefused as error:
                if error.status != NO_MEMORY or time.monotonic() > deadline:
                    raise
                if not said:
                    logger.warning(
                        "[Turns] %s; asking again for up to %g s", error, self._server.timeout
                    )
                said = True
            gc.collect()  # what is kept by nothing but cycles
            release_memory()
            self._server.sleep(_RETRY_SECONDS)

    def _wake_if_possible(self, epoch: Callable[[], int]) -> None:
        """While another error is on its way, which must not be hidden by one of these."""
        try:
            self._ranks.together("giving memory back to the GPU", release_memory)
            self._ask("wake", epoch())
        except (TrainerError, RuntimeError) as error:
            logger.warning(
                "[Turns] the call to sample again failed, and the server finds out by itself: %s",
                error,
            )

    def _restarted(self, error: BridgeError) -> bool:
        waiting = f"[Turns] {error}; looking whether the server was restarted"
        return self._ranks.on_main(
            "asking vLLM", lambda: self._server.wait_for_restart(waiting), self._server.longest_wait
        )

    def _ask(self, step: str, epoch: int) -> float:
        """Bytes in the answer, on every rank."""
        return float(
            self._ranks.on_main(
                f"/turns/{step}", lambda: self._call(step, epoch), self._server.longest_wait
            )["bytes"]
        )

    def _call(self, step: str, epoch: int) -> dict[str, Any]:
        return self._server.call(f"/turns/{step}", {"epoch": epoch})


def release_memory() -> None:
    """Give the GPU what torch keeps for later, once nothing uses it any more."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def require_turns(info: dict[str, Any], url: str) -> int:
    """Bytes of keys and values that each rank of the server of /bridge/info gives a trainer in its
    turn.

    Raises:
        BridgeError: none; it was not started for it.
    """
    size = int(info.get("cache_bytes", 0))
    if not size:
        raise BridgeError(
            f"--colocate needs a server that takes turns, and {url} does not: stop it and start it with --colocate, or leave "
            "the trainer's --colocate out"
        )
    return size
