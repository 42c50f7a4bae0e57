"""SpreadTrainer that stops in the middle of a transfer, so that a fault can be done to one of vLLM's ranks there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bench.gpu.fault_trainer import broken_transfer, once, replaced, told_to_go_on
from bench.gpu.spread_trainer import SpreadTrainer, main
from example_trainer.weight_bridge.broadcast import BroadcastBridge

HELD_SECONDS = 120.0


class SpreadFaultTrainer(SpreadTrainer):
    """Every rank stops; rank 0 tells the parent, and the others wait for its word."""

    def sync_held(self, at: str) -> dict[str, Any]:
        """One update that stops in `transfer`, says so ({"event": "transfer"}), and goes on when rank 0 reads a line."""
        if at != "transfer":
            raise ValueError(f"a trainer of several ranks can be held in transfer, not in {at!r}")

        def wait() -> None:
            # A rank of vLLM's that is stopped before its half has arrived would keep its sender from ever coming here.
            self.ranks.barrier("holding the transfer")
            heard = self.answers is None or told_to_go_on(self.answers, at)
            if not self.ranks.broadcast(heard, "the word to go on", timeout=HELD_SECONDS):
                os._exit(1)  # the parent has gone

        assert isinstance(self.bridge, BroadcastBridge)
        with replaced(broken_transfer(self.bridge._sessions[0], once(wait))):
            return self._update(lambda: self.write(1 - self.served_set))

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "sync_held": self.sync_held}


if __name__ == "__main__":
    main(SpreadFaultTrainer)
