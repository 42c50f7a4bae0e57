"""On-policy distillation: the student samples, a teacher scores what was sampled, and their reverse
KL is made smaller.

Sources: the reverse KL on the student's own samples is that of Agarwal et al., "On-Policy
Distillation of Language Models" (arXiv:2306.13649), and of MiniLLM (Gu et al., arXiv:2306.08543);
k2 is the second estimator of J. Schulman's note "Approximating KL Divergence" (2020,
http://joschu.net/blog/kl-approx.html).

At a position whose prefix is held fixed, with π the student, T the teacher, and r = log π - log T:

    KL(π‖T) = E_{y~π}[ r(y) ]
    ∇KL     = E_{y~π}[ r ∇log π ] + E_{y~π}[ ∇log π ] = E_{y~π}[ r ∇log π ]        since Σ_y ∇π(y) = ∇1 = 0

Both forms below have this gradient in expectation over samples of π. That of the advantage, -coef ·
r without gradient, is the policy gradient with r as a cost: -A ∇log π = coef · r ∇log π. That of
the loss, coef · r²/2 (k2), is coef · r ∇r, the same; its value is no estimate of the KL. The
advantage goes through the loss that was chosen, with its clipping and correction weights; the loss
is added beside it. Neither counts what a token does to the KL of those after it.

A token without a teacher's logprob (NaN) counts as if the teacher agreed: r = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from example_trainer.algorithm.divergence import MAX_LOG_RATIO, k3
from example_trainer.errors import BatchError

MAX_LOGPROB = 1e6
"""Teacher's logprobs are clamped to ± this where a loss grows with them, so that one absurd token
gives no infinity."""


def distillation_advantage(old_logprobs: Tensor, teacher_logprobs: Tensor, coef: float) -> Tensor:
    """What a token's advantage gains: -coef · (log π_old - log T), the log ratio within ±
    MAX_LOG_RATIO.

    Args:
        old_logprobs: [n] float32 under the policy that the loss takes its ratio to.
        teacher_logprobs: [n] float32, NaN where the teacher said nothing.
        coef: `--distill-coef`.

    Returns:
        [n] float32, without gradient.
    """
    return -coef * _log_ratio(old_logprobs.detach(), teacher_logprobs)


def distillation_loss(logprobs: Tensor, teacher_logprobs: Tensor, coef: float) -> Tensor:
    """coef · (log π - log T)² / 2 of each token. Beyond ± MAX_LOG_RATIO it grows linearly, with the
    gradient of the limit.

    Args:
        logprobs: [n] float32 of the sampled tokens under the present policy, with gradient.
        teacher_logprobs: [n] float32, NaN where the teacher said nothing.
        coef: `--distill-coef`.

    Returns:
        [n] float32, with gradient.
    """
    known = torch.isfinite(teacher_logprobs)
    # Not `where` on the result alone: the gradient of the NaN would come through it as NaN.
    ratio = logprobs - torch.where(
        known, teacher_logprobs.clamp(-MAX_LOGPROB, MAX_LOGPROB), logprobs.detach()
    )
    limited = ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return coef * limited * (ratio - limited / 2)


def teacher_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(student ‖ teacher), in nats, summed over the tokens that the teacher
    scored.

    Args:
        logprobs: [n] float32 of the sampled tokens under the student.
        teacher_logprobs: [n] float32, NaN where the teacher said nothing.

    Returns:
        Scalar float32, without gradient. Divide it by the number of tokens that were scored.
    """
    return k3(-_log_ratio(logprobs.detach(), teacher_logprobs)).sum()


def untaught_share(taught: int, tokens: int) -> float:
    """The share of a batch's trained tokens for which no teacher's logprob came along.

    Args:
        taught: trained tokens that have one, of the whole batch.
        tokens: trained tokens of the whole batch.

    Raises:
        BatchError: not one of them has one.
    """
    if tokens > 0 and taught == 0:
        raise BatchError(
            f"--distill-coef is above 0, but none of the {tokens} trained tokens of this batch has a teacher's logprob "
            "(distill_logprobs): start the environments with --env.teacher_url, or leave --distill-coef out"
        )
    return 1.0 - taught / max(tokens, 1)


def _log_ratio(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """log π - log T within ± MAX_LOG_RATIO, 0 where either is unknown."""
    return torch.nan_to_num(logprobs - teacher_logprobs, nan=0.0).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
