"""The process that test_prefetch.py kills: a trainer that takes one batch and trains on it for
ever.

Arguments: service, folder.
"""

from __future__ import annotations

import sys
import time

import torch

from example_trainer.batch.client import Registration, RolloutClient
from example_trainer.batch.prefetch import Batches
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal


def registration(folder: str, **changes: int | None) -> Registration:
    """Registration of a trainer with two sequences in a batch."""
    fields = {
        "batch_size": 2,
        "max_token_len": 64,
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 100,
    }
    return Registration(
        wandb_group="g", wandb_project="p", checkpoint_dir=folder, model="m", **(fields | changes)
    )  # type: ignore[arg-type]


def batches_of(url: str) -> Batches:
    """The batches of a service, as the trainer makes them."""
    config = TrainerConfig.model_validate(
        {"model_name": "m", "atropos_url": url, "seq_len": 64, "service_timeout": 60}
    )
    client = RolloutClient(url, StopSignal(), None, service_timeout=60, batch_timeout=60)
    reader = BatchReader(config, vocab_size=1000, tokens_per_bin=64)
    return Batches(client, Ranks(), reader, torch.device("cpu"), last_version=100, ahead=True)


if __name__ == "__main__":
    batches = batches_of(sys.argv[1])
    batches.register(registration(sys.argv[2]))
    batch = batches.next(0)
    sys.stdout.write(f"training on {batch.minibatches[0][0].targets.tolist()}\n")
    sys.stdout.flush()
    time.sleep(600)
