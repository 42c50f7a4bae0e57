"""The wait for a batch: work that falls due in the meantime is done by every rank, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from example_trainer.batch.client import RolloutClient, Upkeep
from example_trainer.batch.shared_client import SharedRollouts
from example_trainer.errors import TrainerError
from example_trainer.parallel.ranks import Ranks


class Client:
    """Looks after the upkeep a few times before the batch comes, as RolloutClient does."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waits = looks, 0

    def next_batch(self, upkeep: Upkeep | None = None) -> list[dict[str, Any]]:
        self.waits += 1
        while self.looks:
            self.looks -= 1
            if upkeep is not None and upkeep.due():
                upkeep.work()
        return [{"tokens": [[1]]}]


def rollouts(client: Client) -> SharedRollouts:
    return SharedRollouts(Ranks(), cast(RolloutClient, client), 1.0, 1.0)


@pytest.mark.parametrize("due", [(), (0,), (1, 2), (0, 1, 2)])
def test_work_is_done_between_two_waits(due: tuple[int, ...]) -> None:
    client, looks, done = Client(3), iter(range(3)), []
    upkeep = Upkeep(lambda: next(looks) in due, lambda: done.append(client.waits))
    assert rollouts(client).next_batch(upkeep) == [{"tokens": [[1]]}]
    assert client.waits == 1 + len(due)
    assert done == list(range(1, 1 + len(due)))


def test_without_upkeep_it_waits_once() -> None:
    client = Client(3)
    rollouts(client).next_batch()
    assert client.waits == 1


@pytest.mark.parametrize("part", ["due", "work"])
def test_what_goes_wrong_in_it_ends_the_wait(part: str) -> None:
    def fail() -> bool:
        raise TrainerError("the server has gone for good")

    due: Callable[[], bool] = fail if part == "due" else lambda: True
    with pytest.raises(TrainerError, match="for good"):
        rollouts(Client(1)).next_batch(Upkeep(due, fail))
