"""A trainer's registration with the rollout service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.wire import MAX_SESSIONS, TrainerSession
from example_trainer.config import TrainerConfig


@dataclass(frozen=True)
class Registration:
    """What the trainer tells the service, and through it the environments.

    Attributes:
        batch_size: sequences in each batch.
        max_token_len: longest sequence in tokens.
        save_checkpoint_interval: steps between checkpoints, 0 for none but the last.
        starting_step, num_steps: optimizer steps done and to be done in all.
        max_staleness: oldest data wanted, in weight versions; None for any.
        model: what is trained; with checkpoint_dir it keeps one run's rollouts from another's
            trainer.
        weight_epoch: of the weights that this trainer makes; see ages.
        run: names the run over all its resumes; None for one without a name.
        lives: [weight epoch, starting step] of each trainer of the run, this one last.
        positions: of the last batch that the weights have learned from, {} before the first; None
            if that is not known.
        replay: policy, max_reuse and seed, by which the service uses groups; None for each once,
            oldest first.
        ref_logprobs_from_workers: groups that come without ref_logprobs wait for reference workers.
        reference: what those are to compute; see training.reference.
        log_dir: where the trainer writes its figures, for the service's page.
        inference_servers: addresses of the vLLM servers that it was started with, likewise.
    """

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    max_staleness: int | None = None
    model: str | None = None
    weight_epoch: int = 0
    run: str | None = None
    lives: list[list[int]] | None = None
    positions: dict[str, int] | None = None
    replay: dict[str, Any] | None = None
    ref_logprobs_from_workers: bool = False
    reference: dict[str, str | float | bool] | None = None
    log_dir: str | None = None
    inference_servers: list[str] | None = None


def addresses_of_servers(config: TrainerConfig) -> list[str] | None:
    """The vLLM servers that get this trainer's weights, for the service's page; None if the options
    name none.
    """
    if config.weight_bridge_mode not in ("shared_vllm", "lora_only") and not config.starts_vllm:
        return None
    return [f"http://{host}:{port}" for host, port in config.vllm_addresses]


def registration(
    config: TrainerConfig,
    starting_step: int,
    lives: Sequence[TrainerSession] = (),
    positions: dict[str, int] | None = None,
    reference: dict[str, str | float | bool] | None = None,
    run: str | None = None,
) -> Registration:
    """Return the registration of a trainer.

    Args:
        starting_step: optimizer steps behind its weights.
        lives: the trainers of its run, itself last; see ages.
        positions: where its data goes on.
        reference: for reference workers to compute; None without them.
        run: the run's name; None if it has none.
    """
    project, group = config.wandb_names
    return Registration(
        wandb_group=group,
        wandb_project=project,
        batch_size=config.sequences_per_step,
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path.resolve()),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=starting_step,
        num_steps=config.training_steps,
        max_staleness=config.oldest_rollouts,
        model=config.model_name,
        weight_epoch=lives[-1].epoch if lives else 0,
        run=run,
        lives=[[life.epoch, life.start] for life in lives[-MAX_SESSIONS:]] or None,
        positions=positions,
        replay={"policy": config.replay, "max_reuse": config.max_reuse, "seed": config.seed}
        if config.replays
        else None,
        ref_logprobs_from_workers=reference is not None,
        reference=reference,
        log_dir=str(config.log_dir.resolve()),
        inference_servers=addresses_of_servers(config),
    )
