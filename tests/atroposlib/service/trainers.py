"""Registrations of trainers, short enough to be written in one line of a test."""

from __future__ import annotations

from typing import Any

import orjson

from atroposlib.service.schemas import Registration
from atroposlib.service.store import Changes, Snapshot


def stored(*together: Changes) -> Snapshot:
    """Return what a store holds after these changes."""
    snapshot = Snapshot()
    for changes in together:
        for (kind, id), record in changes.records.items():
            records = snapshot.records.setdefault(kind, {})
            records.pop(id, None)
            if record is not None:
                records[id] = orjson.loads(record)
    return snapshot


def registered(
    uuid: int,
    wandb_group: str,
    wandb_project: str,
    batch_size: int,
    max_token_len: int,
    checkpoint_dir: str,
    save_checkpoint_interval: int,
    starting_step: int,
    num_steps: int,
    **fields: Any,
) -> Registration:
    """Return a registration, in the order of the fields of POST /register."""
    return Registration(
        uuid=uuid,
        wandb_group=wandb_group,
        wandb_project=wandb_project,
        batch_size=batch_size,
        max_token_len=max_token_len,
        checkpoint_dir=checkpoint_dir,
        save_checkpoint_interval=save_checkpoint_interval,
        starting_step=starting_step,
        num_steps=num_steps,
        **fields,
    )
