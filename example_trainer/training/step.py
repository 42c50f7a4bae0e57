"""The gradient of one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from example_trainer.algorithm.losses import chosen_logprobs, grpo_loss
from example_trainer.batch.groups import Batch, MicroBatch, empty_microbatch, microbatches
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.decoder import DeterministicDecoder
from example_trainer.deterministic.parity import NoParity, ParityCheck
from example_trainer.models import Decoder
from example_trainer.models.split_head import split_chosen_logprobs
from example_trainer.process import StopSignal
from example_trainer.training.optimizer import MasterAdamW


@dataclass
class StepSums:
    """Figures of a batch: the loss, and means over its trained tokens.

    Attributes:
        loss: what the gradient is of.
        kl: KL(rollout policy ‖ current policy) by k3, in nats.
        reference_kl: KL(current policy ‖ reference) by k3, in nats; 0 without a reference.
        entropy: of the current policy where it chose the tokens, in nats.
        clip_fraction: share of the tokens whose gradient is stopped by clipping.
        missing_rollout_logprobs: share of the tokens that came without a rollout logprob.
    """

    loss: float = 0.0
    kl: float = 0.0
    reference_kl: float = 0.0
    entropy: float = 0.0
    clip_fraction: float = 0.0
    missing_rollout_logprobs: float = 0.0


def accumulate_gradients(
    model: Decoder,
    optimizer: MasterAdamW,
    batch: Batch,
    config: TrainerConfig,
    stop: StopSignal,
    reference: Decoder | None = None,
    parity: ParityCheck | None = None,
) -> StepSums:
    """Add the gradient of a batch to the optimizer's, one microbatch at a time.

    How the batch is split does not matter: every token's weight is its weight in the whole batch. With data-parallel ranks
    each adds the gradient of its own microbatches, and all get the whole batch's figures. Collective.

    Raises:
        StopRequested: a signal came; the step must not be taken.
        ParityError: `parity` found a token whose logprob is not vLLM's; no gradient of it was taken.
    """
    parity = parity or NoParity()
    parity.begin(batch, optimizer.steps)
    device = model.output_weight.device
    totals = torch.zeros(6, dtype=torch.float64, device=device)
    parts = list(microbatches(batch, config.batch_size, config.loss_normalisation, config.seq_len))
    for micro in model.shards.share(parts, empty_microbatch()):
        stop.check()
        micro = micro.to(device)
        logprobs, entropy = response_logprobs(model, micro, config)
        parity.compare(micro, logprobs)
        reference_logprobs = None
        if reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = response_logprobs(reference, micro, config)
                reference.shards.release(reference)
        loss, sums = grpo_loss(
            logprobs,
            micro.rollout_logprobs,
            micro.advantages,
            micro.weights,
            clip_low=config.clip_eps,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            reference_logprobs=reference_logprobs,
        )
        loss.backward()
        optimizer.collect()
        figures = (loss.detach(), sums.kl, sums.reference_kl, entropy.sum(), sums.clipped, sums.missing_rollout_logprobs)
        totals += torch.stack([figure.double() for figure in figures])
    if isinstance(model, DeterministicDecoder):
        model.deliver_gradients(optimizer.masters)
    loss_sum, *others = model.shards.sum_figures(totals).tolist()
    return StepSums(loss_sum, *(value / batch.trained_tokens for value in others))


def response_logprobs(model: Decoder, micro: MicroBatch, config: TrainerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob and entropy ([n] float32 each) at the trained tokens; only these are projected to the vocabulary."""
    if isinstance(model, DeterministicDecoder):
        return model.response_logprobs(micro, config.logprob_chunk)
    hidden = model(micro.tokens).flatten(0, 1).index_select(0, micro.sources)
    if model.split.size > 1:
        return split_chosen_logprobs(
            hidden,
            model.output_weight,
            micro.targets,
            model.geometry.vocab_size,
            model.split,
            config.logprob_chunk,
            config.temperature,
        )
    return chosen_logprobs(hidden, model.output_weight, micro.targets, config.logprob_chunk, config.temperature)
