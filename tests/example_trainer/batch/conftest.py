"""Shared parts of the tests of the rollout client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from example_trainer.batch.client import RolloutClient
from example_trainer.process import StopSignal
from tests.example_trainer.batch.scripted import Scripted


@pytest.fixture
def client_of() -> Iterator[Callable[..., RolloutClient]]:
    clients: list[RolloutClient] = []

    def make(url: str, **options: Any) -> RolloutClient:
        clients.append(
            RolloutClient(
                url,
                options.pop("stop", StopSignal()),
                **{"service_timeout": 60, "batch_timeout": 60} | options,
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def scripted() -> Iterator[Callable[[dict[str, list[Any]]], Scripted]]:
    with ExitStack() as servers:

        def make(answers: dict[str, list[Any]]) -> Scripted:
            usual = {"/register": [{"uuid": 1}], "/status": [{"queue_size": 0}]}
            return servers.enter_context(Scripted(usual | answers))

        yield make
