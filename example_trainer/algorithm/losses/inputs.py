"""What a loss is a function of, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from example_trainer.algorithm.divergence import clamped_log_ratio
from example_trainer.algorithm.sequences import sequence_mean


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of a bin: n of them, in the order of its sequences and, in each, of the
    tokens.

    Attributes:
        logprobs: [n] float32, with gradient: of the chosen tokens under the present policy.
        old_logprobs: [n] float32, without: under the policy that the ratio is taken to. See
            docs/algorithms.md for which it is; where it is unknown it is the present one, so that
            the ratio is 1 and the gradient the plain policy gradient.
        advantages: [n] float32.
        sequence: [n] int64, ascending: which sequence of the bin each token is of.
        sequences: how many there are; each has a token.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    sequences: int

    @property
    def log_ratio(self) -> Tensor:
        """[n] with gradient: log of the present policy's probability over the old one's, within ±
        MAX_LOG_RATIO.
        """
        return clamped_log_ratio(self.logprobs, self.old_logprobs)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[n]: for each token the mean of [n] values over its sequence, with gradient."""
        return sequence_mean(values, self.sequence, self.sequences)


@dataclass(frozen=True)
class LossSettings:
    """What the options say to a loss.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below 1 and rise above it.
        dual_clip: at which ratio the loss of a negative advantage stops growing; None for nowhere.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None


@dataclass(frozen=True)
class TokenLosses:
    """A loss for each token, before it is weighted: what the token counts in its batch is not the
    loss's business.

    Attributes:
        losses: [n] float32, with gradient.
        clipped_low, clipped_high: [n] bool: tokens on which the lower or the upper bound acts.
    """

    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor

    @classmethod
    def unclipped(cls, losses: Tensor) -> TokenLosses:
        """Losses without bounds."""
        nowhere = torch.zeros_like(losses, dtype=torch.bool)
        return cls(losses, nowhere, nowhere)


Loss = Callable[[LossInputs, LossSettings], TokenLosses | Tensor]
"""A bare [n] tensor counts no token as clipped."""
