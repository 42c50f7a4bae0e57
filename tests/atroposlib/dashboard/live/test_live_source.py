"""The service's page knows a run that an earlier process of the service has seen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atroposlib.dashboard.live.hub import Hub
from atroposlib.dashboard.live.monitor import LiveSource, ObservedFolder, Place
from atroposlib.service.records import Limits, ValidatedGroup
from atroposlib.service.schemas import Registration
from atroposlib.service.service import RolloutService
from atroposlib.service.store import MemoryStore
from tests.atroposlib.service.trainers import registered

TRAINER = registered(1, "g", "p", 2, 128, "c", 5, 0, 100, model="m")


@pytest.mark.parametrize(("uuid", "missed"), [(1, True), (2, False)])
def test_a_trainer_that_died_while_the_service_was_away_is_missed(
    tmp_path: Path, uuid: int, missed: bool
) -> None:
    """Though it holds a batch: a trainer that reports no servers may be silent for long beside it.
    So may the next one, which has not reported anything yet.
    """

    async def run() -> None:
        before = source(tmp_path, TRAINER)
        before.service.note_trainer_call(publishes=True)
        await before.round()
        after = source(tmp_path, TRAINER.model_copy(update={"uuid": uuid}))
        queue, now = after.service.queue, after.service.clock()
        queue.add(ValidatedGroup(b"{}", 2, 3, weights=((None, 0),)), now)
        lease = queue.next_batch(now, None, None)
        assert lease is not None
        queue.sent(lease, complete=True)
        after.service.clock = lambda: now + 3600.0
        await after.round()
        assert [fault["part"] for fault in after.stack["faults"]] == ["trainer"] * missed
        for one in before, after:
            await one.watch.close()
            await one.service.committer.close()

    asyncio.run(run())


def source(folder: Path, trainer: Registration) -> LiveSource:
    """The source of a fresh process, whose store has a trainer's registration."""
    service = RolloutService(MemoryStore(), Limits())
    service.queue.register(trainer)
    return LiveSource(service, ObservedFolder(folder), Hub(), Place())
