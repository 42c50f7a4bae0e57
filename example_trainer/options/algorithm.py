"""What is learned from a rollout: the loss, corrections for a sampler that is not the trainer,
lengths, a teacher.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from example_trainer.algorithm.advantages import BUILT_IN as ADVANTAGES
from example_trainer.algorithm.advantages import DEFAULT_BETA, DIVIDED, Normalisation
from example_trainer.algorithm.corrections import Correction, RatioTo
from example_trainer.algorithm.functions import built_in, is_import
from example_trainer.algorithm.methods import BOUNDS, KLPlace, Method, method_named
from example_trainer.options.section import Section, flag_of


class AlgorithmOptions(Section):
    """Algorithm"""

    loss: str = Field(
        "grpo",
        min_length=1,
        description="grpo, dr_grpo, dapo, gspo, cispo, reinforce, rloo, reinforce_pp, reinforce_pp_baseline, dual_clip, or "
        "module:function; sets what follows as its paper does, where not given",
    )
    advantages: str | None = Field(
        None,
        min_length=1,
        description="group, leave_one_out, batch, group_batch, exponential, scores, zero, or module:function; not given: the "
        "loss's",
    )
    advantage_beta: float = Field(
        DEFAULT_BETA,
        gt=0,
        allow_inf_nan=False,
        description="exponential: β of exp(score/β) / mean - 1, in units of the score",
    )
    advantage_std: bool | None = Field(
        None,
        description="divide advantages by the group's, or the batch's, standard deviation; not given: the loss's",
    )
    loss_normalisation: Normalisation | None = Field(
        None,
        description="average over all tokens, over sequences, or by the constant seq-len; not given: the loss's",
    )
    clip_eps: float | None = Field(
        None,
        gt=0,
        le=1,
        description="how far the ratio may fall (and rise) before its gradient stops; not given: the loss's",
    )
    clip_eps_high: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="how far it may rise, if not as far as it may fall",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="where the loss of a negative advantage stops growing with the ratio; not given: nowhere",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of the divergence from the reference model; 0: no reference is loaded",
    )
    kl_in: KLPlace | None = Field(
        None,
        description="whether that divergence is part of the loss or taken off the reward; not given: the loss's",
    )
    reference_model: str | None = Field(
        None, description="model of that divergence; not given: --model-name as it was at first"
    )
    ref_logprobs_from_workers: bool = Field(
        False,
        description="reference workers compute the logprobs of that divergence, and no reference is loaded here",
    )
    entropy_coef: float = Field(
        0.0,
        allow_inf_nan=False,
        description="weight of the policy's entropy, which the loss then rewards",
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over a batch, for one weight version")
    minibatches: int = Field(
        1, ge=1, description="optimizer updates in each time, with a part of the batch each"
    )
    temperature: float = Field(
        1.0,
        ge=0.01,
        allow_inf_nan=False,
        description="divides the logits of sequences that do not say at which temperature they were sampled",
    )
    allow_truncated_sampling: bool = Field(
        False,
        description="train on what was sampled with top-p, top-k, min-p or penalties too, with a bias that the log names",
    )
    logprob_chunk: int | None = Field(
        None,
        ge=1,
        description="tokens whose logits exist at the same time; not given: 4096 on a GPU, 1024 on a CPU",
    )

    @property
    def method(self) -> Method:
        """The loss's choices, with those of the options in their places."""
        own = method_named(self.loss)
        names = (
            "advantages",
            "advantage_std",
            "loss_normalisation",
            "clip_eps",
            "dual_clip",
            "kl_in",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.clip_eps_high is not None or self.clip_eps is not None:
            given["clip_eps_high"] = self.clip_eps_high
        return replace(own, **given)

    @property
    def clip_high(self) -> float:
        """How far the ratio may rise."""
        method = self.method
        return method.clip_eps if method.clip_eps_high is None else method.clip_eps_high

    @model_validator(mode="after")
    def _choices_agree(self) -> AlgorithmOptions:
        method = self.method
        if not is_import(method.advantages):
            built_in("--advantages", method.advantages, ADVANTAGES)
        known = BOUNDS.get(method.loss, ("clip_eps", "clip_eps_high", "dual_clip"))
        for name in ("clip_eps", "clip_eps_high", "dual_clip"):
            if getattr(self, name) is not None and name not in known:
                has = " and ".join(map(flag_of, known)) or "no bounds"
                raise ValueError(
                    f"{flag_of(name)} has no part in --loss {self.loss}, which has {has}; leave it out"
                )
        if self.advantage_std and method.advantages not in DIVIDED:
            raise ValueError(
                f"--advantage-std has no part in --advantages {method.advantages}: only those of {', '.join(DIVIDED)} are "
                "divided by a standard deviation; leave it out"
            )
        if "advantage_beta" in self.model_fields_set and "advantages" not in self.model_fields_set:
            raise ValueError(
                f"--advantage-beta {self.advantage_beta:g} needs --advantages exponential"
            )
        if self.kl_in is not None and "kl_coef" not in self.model_fields_set:
            raise ValueError(
                f"--kl-in {self.kl_in} needs --kl-coef, without which no divergence is taken"
            )
        if self.ref_logprobs_from_workers and "kl_coef" not in self.model_fields_set:
            raise ValueError(
                "--ref-logprobs-from-workers needs --kl-coef, without which no divergence is taken"
            )
        return self


class CorrectionOptions(Section):
    """Corrections for a sampler that is not the trainer"""

    correction: Correction = Field(
        "token_truncate",
        description="what is done about trainer and sampler not being the same: weights (truncate) or left out (mask), by the "
        "ratio of a token or of its sequence",
    )
    correction_high: float = Field(
        2.0,
        ge=1,
        allow_inf_nan=False,
        description="highest weight, or highest ratio that is not left out",
    )
    correction_low: float = Field(0.5, gt=0, lt=1, description="lowest ratio that is not left out")
    correction_ratio: RatioTo = Field(
        "proximal",
        description="the ratio to the sampler is that of the batch's first weights, or of the present ones",
    )
    sequence_kl_limit: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="leave out sequences whose KL to the sampler is larger, in nats per token; not given: none",
    )

    @model_validator(mode="after")
    def _bounds_are_used(self) -> CorrectionOptions:
        if "correction_low" in self.model_fields_set and self.correction.endswith("truncate"):
            raise ValueError(
                f"--correction-low has no part in --correction {self.correction}, whose weights have an upper bound alone; "
                "leave it out, or give token_mask or sequence_mask"
            )
        return self


class LengthOptions(Section):
    """Lengths"""

    truncated_answers: Literal["train", "mask", "penalise"] = Field(
        "train",
        description="answers that ran into their limit: trained on, left out of the loss, or penalised softly (DAPO)",
    )
    overlong_buffer: int = Field(
        128,
        ge=1,
        description="penalise: over how many tokens before the limit the penalty grows from 0 to its full size",
    )
    overlong_penalty: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="penalise: taken off the score at the limit"
    )
    too_long: Literal["mask", "drop"] = Field(
        "mask",
        description="sequences longer than --seq-len: not trained on, or as if they had never been there",
    )
    forward_zero_advantages: bool | None = Field(
        None,
        description="forward sequences whose advantage is 0 too; not given: only if something needs them",
    )

    @model_validator(mode="after")
    def _penalty_is_wanted(self) -> LengthOptions:
        for name in ("overlong_buffer", "overlong_penalty"):
            if name in self.model_fields_set and "truncated_answers" not in self.model_fields_set:
                raise ValueError(
                    f"{flag_of(name)} needs --truncated-answers penalise, which is {self.truncated_answers!r}"
                )
        return self


class DistillationOptions(Section):
    """On-policy distillation"""

    distill_coef: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of the reverse KL to the teacher whose logprobs came along; 0: none",
    )
    distill_in: Literal["advantage", "loss"] = Field(
        "advantage",
        description="whether it is taken off each token's advantage, or is part of the loss",
    )

    @model_validator(mode="after")
    def _distils(self) -> DistillationOptions:
        if "distill_in" in self.model_fields_set and "distill_coef" not in self.model_fields_set:
            raise ValueError(
                f"--distill-in {self.distill_in} needs --distill-coef, without which there is no teacher"
            )
        return self
