"""What is learned from a rollout: the loss, corrections for a sampler that is not the trainer, lengths, a teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from example_trainer.algorithm.advantages import Normalisation
from example_trainer.algorithm.methods import KLPlace, Method, method_named
from example_trainer.options.section import Section

Correction = Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]


class AlgorithmOptions(Section):
    """Algorithm"""

    loss: str = Field(
        "grpo",
        min_length=1,
        description="grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, dual_clip, or module:function; sets what follows as "
        "its paper does, where not given",
    )
    advantages: str | None = Field(
        None, description="group, leave_one_out, batch, scores, zero, or module:function; not given: the loss's"
    )
    advantage_std: bool | None = Field(
        None, description="divide advantages by the group's standard deviation; not given: the loss's (off for Dr. GRPO)"
    )
    loss_normalisation: Normalisation | None = Field(
        None, description="average over all tokens, over sequences, or by the constant seq-len; not given: the loss's"
    )
    clip_eps: float | None = Field(
        None, gt=0, lt=1, description="how far the ratio may fall (and rise) before its gradient stops; not given: the loss's"
    )
    clip_eps_high: float | None = Field(None, gt=0, description="how far it may rise, if not as far as it may fall")
    dual_clip: float | None = Field(
        None, gt=1, description="where the loss of a negative advantage stops growing with the ratio; not given: nowhere"
    )
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the divergence from the reference model; 0: no reference is loaded"
    )
    kl_in: KLPlace | None = Field(
        None, description="whether that divergence is part of the loss or taken off the reward; not given: the loss's"
    )
    reference_model: str | None = Field(
        None, description="model of that divergence; not given: --model-name as it was at first"
    )
    entropy_coef: float = Field(
        0.0, allow_inf_nan=False, description="weight of the policy's entropy, which the loss then rewards"
    )
    ppo_epochs: int = Field(1, ge=1, description="times that a batch is gone through, for one weight version")
    minibatches: int = Field(1, ge=1, description="optimizer updates in each time, with a part of the batch each")
    temperature: float = Field(
        1.0, gt=0, description="divides the logits of sequences that do not say at which temperature they were sampled"
    )
    allow_truncated_sampling: bool = Field(
        False, description="train on what was sampled with top-p, top-k, min-p or penalties too, with a bias that the log tells"
    )
    logprob_chunk: int | None = Field(
        None, ge=1, description="tokens whose logits exist at the same time; not given: 4096 on a GPU, 1024 on a CPU"
    )

    @property
    def method(self) -> Method:
        """The loss's choices, with those of the options in their places."""
        own = method_named(self.loss)
        names = ("advantages", "advantage_std", "loss_normalisation", "clip_eps", "dual_clip", "kl_in")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.clip_eps_high is not None or self.clip_eps is not None:
            given["clip_eps_high"] = self.clip_eps_high
        return replace(own, **given)

    @property
    def clip_high(self) -> float:
        """How far the ratio may rise."""
        method = self.method
        return method.clip_eps if method.clip_eps_high is None else method.clip_eps_high


class CorrectionOptions(Section):
    """Corrections for a sampler that is not the trainer"""

    correction: Correction = Field(
        "token_truncate",
        description="what is done about trainer and sampler not being the same: weights (truncate) or left out (mask), by the "
        "ratio of a token or of its sequence",
    )
    correction_high: float = Field(
        2.0, gt=1, allow_inf_nan=False, description="highest weight, or highest ratio that is not left out"
    )
    correction_low: float = Field(0.5, gt=0, lt=1, description="lowest ratio that is not left out")
    correction_ratio: Literal["proximal", "now"] = Field(
        "proximal", description="the ratio to the sampler is that of the batch's first weights, or of the present ones"
    )
    sequence_kl_limit: float | None = Field(
        None, gt=0, description="leave out sequences whose KL to the sampler is larger, in nats per token; not given: none"
    )


class LengthOptions(Section):
    """Lengths"""

    truncated_answers: Literal["train", "mask", "penalise"] = Field(
        "train", description="answers that ran into their limit: trained on, left out of the loss, or penalised softly (DAPO)"
    )
    overlong_buffer: int = Field(
        128, ge=1, description="penalise: over how many tokens before the limit the penalty grows from 0 to its full size"
    )
    overlong_penalty: float = Field(1.0, gt=0, allow_inf_nan=False, description="penalise: taken off the score at the limit")
    too_long: Literal["mask", "drop"] = Field(
        "mask", description="sequences longer than --seq-len: not trained on, or as if they had never been there"
    )
    forward_zero_advantages: bool | None = Field(
        None, description="forward sequences whose advantage is 0 too; not given: only if something needs them"
    )


class DistillationOptions(Section):
    """On-policy distillation"""

    distill_coef: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="weight of the reverse KL to the teacher whose logprobs came along; 0: none"
    )
    distill_in: Literal["advantage", "loss"] = Field(
        "advantage", description="whether it is taken off each token's advantage, or is part of the loss"
    )
