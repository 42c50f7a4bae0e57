"""A request to stop that all ranks notice in the same place."""

from __future__ import annotations

from example_trainer.errors import TrainerError
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal


class AgreedStop(StopSignal):
    """A signal that came to any rank, noticed by all of them in the same call of `check`. Collective."""

    def __init__(self, own: StopSignal, ranks: Ranks) -> None:
        super().__init__()
        self._own, self._ranks = own, ranks

    def defer(self) -> None:
        """From now on a signal is noticed in `check` only."""
        self._own.hold()
        self.check()

    def request(self, number: int) -> None:
        self._own.request(number)

    def fail(self, error: TrainerError) -> None:
        self._own.fail(error)

    def check(self) -> None:
        """Raise StopRequested on every rank if a signal came to any."""
        self._ranks.together("agreeing whether to stop", self._own.check)

    def wait(self, seconds: float) -> None:
        raise NotImplementedError("ranks do not sleep together; wait on rank 0, and tell the others")


def agreed_stop(own: StopSignal, ranks: Ranks) -> StopSignal:
    """`own`, agreed upon by all ranks if there are several."""
    return own if ranks.world_size == 1 else AgreedStop(own, ranks)
