"""The weight epoch of a trainer that starts.

The rollout service gives it, so that clocks need not agree.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from example_trainer.api_keys import revealed
from example_trainer.batch.client import RolloutClient
from example_trainer.config import TrainerConfig
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.resume import Start


def with_given_epoch(start: Start, config: TrainerConfig, stop: StopSignal, ranks: Ranks) -> Start:
    """The start with the epoch that the rollout service gives. No server may have weights of this
    trainer yet. Collective.

    Args:
        start: its epoch is above all that the folder knows of.

    Raises:
        RolloutServiceError: the service is not there within --service-timeout.
    """

    def ask() -> int:
        key = revealed(config.atropos_api_key)
        with contextlib.closing(
            RolloutClient(config.atropos_url, stop, key, config.service_timeout)
        ) as client:
            return client.weight_epoch(start.run.epoch, start.run.name)

    epoch = ranks.on_main("asking for a weight epoch", ask, config.service_timeout + ranks.timeout)
    return replace(start, run=start.run.with_epoch(epoch))
