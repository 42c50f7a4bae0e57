"""The registration of tests of the rollout client, and their posts."""

from __future__ import annotations

from typing import Any

from example_trainer.batch.client import Registration

REGISTRATION = Registration(
    wandb_group="g",
    wandb_project="p",
    batch_size=2,
    max_token_len=64,
    checkpoint_dir="checkpoints",
    save_checkpoint_interval=0,
    starting_step=3,
    num_steps=10,
)


def group(number: int) -> dict[str, Any]:
    return {
        "tokens": [[1, number], [1, number]],
        "masks": [[-100, number], [-100, number]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -0.5], [1.0, -0.5]],
        "weight_versions": [0, 0],
    }
