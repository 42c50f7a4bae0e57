"""What the tests of the rollout client share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from example_trainer.batch.client import RolloutClient
from example_trainer.process import StopSignal


@pytest.fixture
def client_of() -> Iterator[Callable[..., RolloutClient]]:
    clients: list[RolloutClient] = []

    def make(url: str, **options: Any) -> RolloutClient:
        clients.append(
            RolloutClient(url, options.pop("stop", StopSignal()), **{"service_timeout": 60, "batch_timeout": 60} | options)
        )
        return clients[-1]

    yield make
    for client in clients:
        client.close()
