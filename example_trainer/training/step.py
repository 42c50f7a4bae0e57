"""The gradient of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from example_trainer.algorithm.losses import grpo_loss
from example_trainer.batch.bins import PackedBin
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import NoParity, ParityCheck
from example_trainer.models import Decoder
from example_trainer.models.packing import NO_PARENT, Packing
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
    bins: Sequence[PackedBin],
    config: TrainerConfig,
    stop: StopSignal,
    reference: Decoder | None = None,
    parity: ParityCheck | None = None,
) -> StepSums:
    """Add the gradient of a batch to the optimizer's, one bin at a time.

    How the batch is packed does not matter: every token's weight is its weight in the whole batch. With data-parallel ranks
    each adds the gradient of its own bins, and all get the whole batch's figures. Collective.

    Args:
        bins: this rank's, on the model's device; every rank has as many.

    Raises:
        StopRequested: a signal came; the step must not be taken.
        ParityError: `parity` found a token whose logprob is not vLLM's; no gradient of it was taken.
    """
    parity = parity or NoParity()
    parity.begin(optimizer.steps)
    totals = torch.zeros(7, dtype=torch.float64, device=model.output_weight.device)
    for bin in bins:
        stop.check()
        packing = bin.packing()
        logprobs, entropy = response_logprobs(model, bin, packing, config)
        parity.compare(bin, logprobs)
        reference_logprobs = None
        if reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = response_logprobs(reference, bin, packing, config)
                reference.shards.release(reference)
        loss, sums = grpo_loss(
            logprobs,
            bin.rollout_logprobs,
            bin.advantages,
            bin.weights,
            clip_low=config.method.clip_eps,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            reference_logprobs=reference_logprobs,
        )
        loss.backward()
        optimizer.collect()
        figures = (loss.detach(), sums.kl, sums.reference_kl, entropy.sum(), sums.clipped, sums.missing_rollout_logprobs)
        totals[:6] += torch.stack([figure.double() for figure in figures])
        totals[6] += sums.tokens
    loss_sum, *others, tokens = model.shards.sum_figures(totals).tolist()
    return StepSums(loss_sum, *(value / tokens for value in others))


def response_logprobs(model: Decoder, bin: PackedBin, packing: Packing, config: TrainerConfig) -> tuple[Tensor, Tensor]:
    """Logprob and entropy ([n] float32 each) at the trained tokens; only these are projected to the vocabulary."""
    hidden = model.arithmetic.ops.rows(model(bin.tokens, packing), bin.sources)
    return model.chosen_logprobs(hidden, bin.targets, bin.sequences(), config.logprob_chunk, config.temperature)


def warm_up(model: Decoder, optimizer: MasterAdamW, config: TrainerConfig) -> None:
    """One pass over made-up tokens, whose gradient is forgotten: kernels are compiled when they are first used, which takes
    a GPU longer than many steps, and environments sample a first batch meanwhile. Collective.
    """
    device = model.output_weight.device
    length = max(1, min(64, model.geometry.max_positions // 2))
    # As in a batch that comes: responses that continue a prompt, if that is done here.
    parents = [NO_PARENT, 0, 0] if config.shares_prefixes else [NO_PARENT] * 3
    packing = Packing([length] * 3, device, parents)
    tokens = torch.zeros(packing.tokens, dtype=torch.int64, device=device)
    hidden = model.arithmetic.ops.rows(model(tokens, packing), torch.arange(packing.tokens, device=device))
    counts = Packing([packing.tokens], device)
    logprobs, _ = model.chosen_logprobs(hidden, tokens, counts, config.logprob_chunk, config.temperature)
    logprobs.sum().backward()
    optimizer.collect()
    optimizer.zero_grad()
