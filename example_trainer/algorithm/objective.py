"""What a bin adds to the loss of its batch: the policy's loss with its corrections, divergences,
entropy. Pure, all in float32.

    loss = Σ_t w_t ( c_t L_t + [kl_in loss] β k3_t + [distill_in loss] δ ½ (logπ_t - logπ_T,t)² ) - η Σ_t w_t H_t

    L_t     the loss of --loss, of the ratio π/π_old and the advantages A_t
    w_t     what the token counts in its batch (token_weights); the batch's denominator is that of all its tokens, corrected,
            left out or not
    c_t     the correction's weight: of the policy loss alone
    k3_t    π_ref/π - log(π_ref/π) - 1, whose mean is KL(π ‖ π_ref)                       DeepSeekMath, arXiv:2402.03300, eq. 4
    H_t     the entropy of π where it chose the token

    [kl_in reward]        A_t -= β Σ_{s ≥ t} (logπ_old,s - logπ_ref,s)    within the sequence; no gradient
    [distill_in advantage] A_t -= δ (logπ_old,t - logπ_T,t)               no gradient; 0 where the teacher said nothing

π_old is the policy that c_t brings the samples' expectation to, so that all three estimate under
the same one:

    correction                            π_old              c_t is of
    none                                  the sampler        (1)
    any, --correction-ratio proximal      π_proximal         π_proximal / sampler
    truncate, --correction-ratio now      π, no gradient     π / sampler: the ratio must not stand in c_t and L_t both
    mask, --correction-ratio now          the sampler        π / sampler, which only chooses

Where the sampler's logprob is needed and unknown it is the present policy's: the ratio is 1 there,
and the gradient the plain policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from example_trainer.algorithm.corrections import CorrectionSettings, correction_weights
from example_trainer.algorithm.distillation import (
    distillation_advantage,
    distillation_loss,
    teacher_kl,
)
from example_trainer.algorithm.divergence import clamped_log_ratio, k3
from example_trainer.algorithm.figures import BinOutcome
from example_trainer.algorithm.losses import (
    Loss,
    LossInputs,
    LossSettings,
    count_nonfinite,
    token_losses,
)
from example_trainer.algorithm.methods import KLPlace


@dataclass(frozen=True)
class Objective:
    """What is minimised: the options, resolved, with the loss itself.

    Attributes:
        name: what --loss says, for errors.
        loss: the function.
        clip: what it is told.
        correction: see corrections.
        kl_coef, kl_in: β, and where its divergence goes.
        entropy_coef: η.
        distill_coef, distill_in: δ, and where its divergence goes.
    """

    name: str
    loss: Loss
    clip: LossSettings
    correction: CorrectionSettings
    kl_coef: float = 0.0
    kl_in: KLPlace = "loss"
    entropy_coef: float = 0.0
    distill_coef: float = 0.0
    distill_in: Literal["advantage", "loss"] = "advantage"

    def ratio_is_one(self, several_updates: bool) -> bool:
        """Whether π_old is the present policy wherever the loss is taken, so that bounds of their
        ratio never act.

        Args:
            several_updates: whether a batch may be for more than one.
        """
        correction = self.correction
        return correction.corrects_present or (
            not several_updates and correction.kind != "none" and correction.needs_proximal
        )


@dataclass(frozen=True)
class ObjectiveInputs:
    """The trained tokens of a bin. n counts them, sequence after sequence.

    Attributes:
        logprobs: [n] float32, with gradient: under the present weights.
        entropy: [n] float32, with gradient where the objective has a weight for it.
        proximal_logprobs: [n] float32, under the weights that the batch began with; None where
            nobody worked them out, which is an error only if the objective needs them. Of the first
            update they are `logprobs` without their gradient.
        rollout_logprobs: [n] float32, when they were sampled; NaN where unknown.
        reference_logprobs: [n] float32; None without a reference.
        teacher_logprobs: [n] float32, NaN where there are none.
        advantages, weights: [n] float32; what each token counts.
        versions: [n] int64, that each was sampled under; negative where nobody said.
        sequence: [n] int64, ascending: which sequence of the bin each token is of.
        sequences: how many there are; each has a token.
    """

    logprobs: Tensor
    entropy: Tensor
    proximal_logprobs: Tensor | None
    rollout_logprobs: Tensor
    reference_logprobs: Tensor | None
    teacher_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    sequence: Tensor
    sequences: int


@dataclass(frozen=True)
class BinLoss:
    """What a bin adds.

    Attributes:
        loss: scalar float32, with gradient.
        outcome: what its figures are made of.
        not_finite: scalar int64, tokens whose policy loss is not finite.
    """

    loss: Tensor
    outcome: BinOutcome
    not_finite: Tensor


def bin_loss(inputs: ObjectiveInputs, objective: Objective) -> BinLoss:
    """The loss of a bin.

    Raises:
        ConfigError: see token_losses.
        ValueError: the objective needs logprobs that are not among the inputs.
    """
    present, correction = inputs.logprobs.detach(), objective.correction
    policy = needed(inputs.proximal_logprobs, "proximal") if correction.needs_proximal else present
    corrected = correction_weights(
        policy, inputs.rollout_logprobs, inputs.sequence, inputs.sequences, correction
    )
    old = old_logprobs(inputs, correction)
    with torch.no_grad():
        advantages = shaped_advantages(inputs, objective, old)
    loss_inputs = LossInputs(inputs.logprobs, old, advantages, inputs.sequence, inputs.sequences)
    losses = token_losses(objective.name, objective.loss, loss_inputs, objective.clip)
    per_token = losses.losses * corrected.weights if correction.active else losses.losses
    reference_kl = taught_kl = taught = torch.zeros((), device=present.device)
    if objective.kl_coef:
        divergence = k3(
            clamped_log_ratio(needed(inputs.reference_logprobs, "reference"), inputs.logprobs)
        )
        reference_kl = divergence.detach().sum()
        if objective.kl_in == "loss":
            per_token = per_token + objective.kl_coef * divergence
    if objective.distill_coef:
        taught_kl, taught = (
            teacher_kl(present, inputs.teacher_logprobs),
            inputs.teacher_logprobs.isfinite().sum(),
        )
        if objective.distill_in == "loss":
            per_token = per_token + distillation_loss(
                inputs.logprobs, inputs.teacher_logprobs, objective.distill_coef
            )
    loss = (per_token * inputs.weights).sum()
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * (inputs.entropy * inputs.weights).sum()
    outcome = BinOutcome(
        logprobs=present,
        rollout_logprobs=inputs.rollout_logprobs,
        versions=inputs.versions,
        entropy=inputs.entropy.detach(),
        weights=corrected.weights,
        masked=corrected.masked,
        bounded=corrected.bounded,
        # What is left out has no gradient to stop.
        clipped_low=losses.clipped_low & ~corrected.masked,
        clipped_high=losses.clipped_high & ~corrected.masked,
        sequence=inputs.sequence,
        sequences=inputs.sequences,
        loss=loss.detach(),
        reference_kl=reference_kl,
        teacher_kl=taught_kl,
        teacher_tokens=taught,
        proximal_logprobs=inputs.proximal_logprobs,
    )
    return BinLoss(loss, outcome, count_nonfinite(losses.losses.detach()))


def old_logprobs(inputs: ObjectiveInputs, correction: CorrectionSettings) -> Tensor:
    """[n] logπ_old, without gradient; see the table above."""
    present = inputs.logprobs.detach()
    if correction.corrects_present:
        return present
    if correction.kind != "none" and correction.needs_proximal:
        return needed(inputs.proximal_logprobs, "proximal")
    return torch.where(inputs.rollout_logprobs.isnan(), present, inputs.rollout_logprobs)


def shaped_advantages(inputs: ObjectiveInputs, objective: Objective, old: Tensor) -> Tensor:
    """[n] the advantages, less the divergences that are taken off them."""
    advantages = inputs.advantages
    if objective.kl_coef and objective.kl_in == "reward":
        reference = needed(inputs.reference_logprobs, "reference")
        advantages = advantages - objective.kl_coef * suffix_sums(
            clamped_log_ratio(old, reference), inputs.sequence
        )
    if objective.distill_coef and objective.distill_in == "advantage":
        advantages = advantages + distillation_advantage(
            old, inputs.teacher_logprobs, objective.distill_coef
        )
    return advantages


def suffix_sums(values: Tensor, sequence: Tensor) -> Tensor:
    """For each token the sum of its value and of those behind it in its sequence: Σ_{s ≥ t} x_s.

    Added elementwise, at distances that double (Hillis and Steele, 1986): a scan of a whole tensor
    has no fixed order on a GPU, and here a token's sum is made of the same pairs whatever its
    sequence is packed with.

    Args:
        values: [n].
        sequence: [n] int64, ascending: which sequence each is of.
    """
    sums, distance = values, 1
    while distance < len(values):
        same = sequence[distance:] == sequence[:-distance]
        sums = sums + pad(torch.where(same, sums[distance:], 0.0), (0, distance))
        distance *= 2
    return sums


def needed(logprobs: Tensor | None, which: str) -> Tensor:
    """They are there, or nothing can be worked out."""
    if logprobs is None:
        raise ValueError(f"the objective needs {which} logprobs, and there are none")
    return logprobs
