"""SpreadTrainer that stops in the middle of a transfer, so that a fault can be done to one of vLLM's ranks there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from bench.gpu.fault_trainer import break_transfer
from bench.gpu.spread_trainer import SpreadTrainer, main
from example_trainer.weight_bridge.broadcast import BroadcastBridge

HELD_SECONDS = 120.0


class SpreadFaultTrainer(SpreadTrainer):
    """Every rank stops; rank 0 tells the parent, and the others wait for its word."""

    def sync_held(self, at: str) -> dict[str, Any]:
        """One update that stops in `transfer`, says so ({"event": "transfer"}), and goes on when rank 0 reads a line."""
        if at != "transfer":
            raise ValueError(f"a trainer of several ranks can be held in transfer, not in {at!r}")
        held = False

        def hold() -> None:
            nonlocal held
            if held:
                return
            held = True
            # A rank of vLLM's that is stopped before its half has arrived would keep its sender from ever coming here.
            self.ranks.barrier("holding the transfer")
            heard = True
            if self.answers is not None:
                self.answers.write({"event": at})
                heard = bool(sys.stdin.readline())
            if not self.ranks.broadcast(heard, "the word to go on", timeout=HELD_SECONDS):
                os._exit(1)  # the parent has gone

        assert isinstance(self.bridge, BroadcastBridge)
        undo = break_transfer(self.bridge._links[0], hold)
        try:
            return self._update(lambda: self.write(1 - self.served_set))
        finally:
            for owner, name in undo:
                delattr(owner, name)

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "sync_held": self.sync_held}


if __name__ == "__main__":
    main(SpreadFaultTrainer)
