"""Weights that make up for a sampler that is not the trainer: other kernels, other precision, or
older weights.

With π the policy of the trainer and μ the one that sampled, as the rollouts' logprobs tell it, per
token

    r_t = π(y_t) / μ(y_t) = exp(logπ_t - logμ_t)

is what E_μ[r f] = E_π[f] needs. Its variance has no bound, so it is truncated, or what lies outside
of a band is left out:

    token_truncate       c_t = min(r_t, high)                       truncated importance sampling (Ionides, 2008); per token
                                                                    as in IMPALA (Espeholt et al., arXiv:1802.01561, section 4)
    token_mask           c_t = 1 if low ≤ r_t ≤ high else 0
    sequence_truncate    c_t = min(r̄, high)
    sequence_mask        c_t = 1 if low ≤ r̄ ≤ high else 0

    r̄ = exp(1/n Σ_t (logπ_t - logμ_t))                              over the n tokens of the sequence whose logμ is known

r̄ is the geometric mean, the sequence ratio of GSPO (Zheng et al., arXiv:2507.18071, equation 7).
The product Π_t r_t would be without bias before it is truncated, but its logarithm grows with the
length: of long answers almost every product lies at a bound, or at 0. The mean means the same for
every length, and so do its bounds.

π may be the policy that the batch began with ("proximal"): then c makes up for the sampler alone,
and the loss's own ratio π_now/π_proximal for the updates of the batch (decoupled PPO: Hilton et
al., arXiv:2110.00641; AReaL: Fu et al., arXiv:2505.24298, section 5). Or it is the present one
("now"), and c makes up for both.

In the dtype of the logprobs, which is float32 in training; nothing here has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from example_trainer.algorithm.divergence import clamped_log_ratio, k3
from example_trainer.algorithm.sequences import sequence_mean

Correction = Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]
RatioTo = Literal["proximal", "now"]


@dataclass(frozen=True)
class CorrectionSettings:
    """How rollouts are corrected.

    Attributes:
        kind: see above.
        low, high: of the ratio.
        ratio: which policy π is.
        sequence_kl_limit: sequences whose KL(μ ‖ π), the mean of k3 over their known tokens in
            nats, is larger are left out; None for none. With any kind, "none" included.
    """

    kind: Correction = "token_truncate"
    low: float = 0.5
    high: float = 2.0
    ratio: RatioTo = "proximal"
    sequence_kl_limit: float | None = None

    @property
    def active(self) -> bool:
        """Whether rollouts' logprobs are compared with anything."""
        return self.kind != "none" or self.sequence_kl_limit is not None

    @property
    def needs_proximal(self) -> bool:
        """Whether the logprobs under the weights that the batch began with are needed."""
        return self.active and self.ratio == "proximal"

    @property
    def corrects_present(self) -> bool:
        """Whether the weights hold the ratio of the present policy to the sampler already, so that
        the loss must not.
        """
        return self.ratio == "now" and self.kind in ("token_truncate", "sequence_truncate")


@dataclass(frozen=True)
class CorrectionWeights:
    """What each token's policy loss is multiplied by.

    Attributes:
        weights: [n] float32, at least 0 and at most `high`.
        masked: [n] bool, left out: the weight is 0.
        bounded: [n] bool, the weight is `high` instead of the ratio.
    """

    weights: Tensor
    masked: Tensor
    bounded: Tensor

    @classmethod
    def of_one(cls, logprobs: Tensor) -> CorrectionWeights:
        """1 for each of [n] tokens."""
        nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
        return cls(torch.ones_like(logprobs), nowhere, nowhere)


@torch.no_grad()
def correction_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence: Tensor,
    sequences: int,
    settings: CorrectionSettings,
) -> CorrectionWeights:
    """The weights c of a bin's tokens.

    They are exactly 1 where the logprobs are equal, bit for bit; and depend on a token's own
    sequence alone.

    Args:
        logprobs: [n] logπ.
        rollout_logprobs: [n] logμ, NaN where unknown. Such a token counts as one of ratio 1: by its
            own ratio it has the weight 1, by its sequence's that of its sequence, and a sequence of
            which nothing is known has the weight 1.
        sequence: [n] int64, ascending: which sequence each token is of.
        sequences: how many there are.
        settings: what is done.
    """
    one = CorrectionWeights.of_one(logprobs)
    if not settings.active:
        return one
    weights, masked, bounded = one.weights, one.masked, one.bounded
    unknown = rollout_logprobs.isnan()
    log_ratio = clamped_log_ratio(logprobs, rollout_logprobs).masked_fill(unknown, 0.0)

    def known_mean(values: Tensor) -> Tensor:
        known_share = sequence_mean((~unknown).to(log_ratio.dtype), sequence, sequences)
        return torch.where(
            known_share > 0, sequence_mean(values, sequence, sequences) / known_share, 0.0
        )

    ratio = (known_mean(log_ratio) if settings.kind.startswith("sequence") else log_ratio).exp()
    if settings.kind.endswith("truncate"):
        weights, bounded = ratio.clamp(max=settings.high), ratio > settings.high
    elif settings.kind.endswith("mask"):
        masked = (ratio < settings.low) | (ratio > settings.high)
    if settings.sequence_kl_limit is not None:
        masked = masked | (known_mean(k3(log_ratio)) > settings.sequence_kl_limit)
    return CorrectionWeights(weights.masked_fill(masked, 0.0), masked, bounded)
