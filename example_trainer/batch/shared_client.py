"""What rank 0 does for all ranks, with the methods that the training loop knows from a trainer of one process."""

from __future__ import annotations

from typing import Any

from example_trainer.batch.client import Registration, RolloutClient, Upkeep
from example_trainer.errors import TrainerError
from example_trainer.observe.metrics import MetricsLog, Row
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.runs import TrainedBatch


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


class _WorkIsDue(Exception):
    """Ends rank 0's wait for a batch: there is something to do in which every rank takes part."""


class SharedRollouts:
    """Rank 0 speaks with the rollout service; every rank gets its answers, and its errors. All methods are collective.

    Args:
        client: on rank 0.
        longest_call, longest_batch: seconds after which a call of the client, or its wait for a batch, has ended.
    """

    def __init__(self, ranks: Ranks, client: RolloutClient | None, longest_call: float, longest_batch: float) -> None:
        self._ranks, self._client = ranks, client
        self._longest_call, self._longest_batch = longest_call + ranks.timeout, longest_batch + ranks.timeout

    @property
    def _main(self) -> RolloutClient:
        assert self._client is not None
        return self._client

    def register(self, registration: Registration) -> None:
        """See RolloutClient.register."""
        self._ranks.on_main("registering with the service", lambda: self._main.register(registration), self._longest_call)

    def next_batch(self, upkeep: Upkeep | None = None) -> list[dict[str, Any]]:
        """See RolloutClient.next_batch. The same groups on every rank; so is the upkeep, while no rank waits for a batch."""
        while True:
            groups: list[dict[str, Any]] | None = self._ranks.on_main(
                "waiting for a batch", lambda: self._wait(upkeep), self._longest_batch
            )
            if groups is not None:
                return groups
            assert upkeep is not None
            upkeep.work()

    def _wait(self, upkeep: Upkeep | None) -> list[dict[str, Any]] | None:
        """On rank 0: a batch, or None when there is work for all ranks first."""

        def work() -> None:
            raise _WorkIsDue

        try:
            return self._main.next_batch(None if upkeep is None else Upkeep(upkeep.due, work))
        except _WorkIsDue:
            return None

    @property
    def lease(self) -> TrainedBatch | None:
        """See RolloutClient.lease. None on the other ranks, which save nothing. Not collective."""
        return self._client.lease if self._client else None

    def acknowledge(self, weight_version: int, skipped: str | None = None) -> None:
        """See RolloutClient.acknowledge."""
        self._ranks.on_main(
            "acknowledging a batch", lambda: self._main.acknowledge(weight_version, skipped), self._longest_call
        )

    def settle(self, batch: TrainedBatch, weight_version: int) -> None:
        """See RolloutClient.settle."""
        self._ranks.on_main(
            "acknowledging an earlier batch", lambda: self._main.settle(batch, weight_version), self._longest_call
        )

    def end_run(self, uuid: int | None = None) -> None:
        """See RolloutClient.end_run."""
        self._ranks.on_main("telling the service that the run has ended", lambda: self._main.end_run(uuid), self._longest_call)

    def queue_size(self) -> int:
        """See RolloutClient.queue_size."""
        return int(self._ranks.on_main("asking the service", lambda: self._main.queue_size(), self._longest_call))

    def close(self) -> None:
        """Close the connection. Not collective."""
        if self._client is not None:
            self._client.close()


class NoMetrics(MetricsLog):
    """Rank 0 writes the figures; the others have the same ones and write none."""

    def __init__(self) -> None:
        return

    def write(self, step: int, row: Row) -> None:
        return

    def close(self) -> None:
        return
