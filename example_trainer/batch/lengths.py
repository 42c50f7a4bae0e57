"""What is made of answers that ran into their limit, and of sequences that are too long for the
trainer. Pure.

Source: the soft overlong punishment is DAPO's (Yu et al., arXiv:2503.14476, equation 13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LENGTH = "length"
"""The finish reason of an answer that ran into its limit."""


@dataclass(frozen=True)
class LengthRules:
    """The options about lengths.

    Attributes:
        truncated_answers: answers that ran into their limit are trained on, or masked: not trained
            on, and in the baseline of the others; or every answer is penalised for coming near its
            limit, see `penalty`.
        buffer: tokens before the limit over which the penalty grows; all of them where the limit is
            less.
        most: the penalty at the limit.
        too_long: sequences longer than the trainer's limit are masked, or dropped as if they had
            never been there.
    """

    truncated_answers: Literal["train", "mask", "penalise"] = "train"
    buffer: int = 128
    most: float = 1.0
    too_long: Literal["mask", "drop"] = "mask"

    @property
    def penalises(self) -> bool:
        """Whether scores fall with the length of answers."""
        return self.truncated_answers == "penalise"

    def penalty(self, tokens: int, limit: int) -> float:
        """What is added to the score of an answer, 0 or less.

            0                                          tokens ≤ limit - buffer
            most · ((limit - buffer) - tokens) / buffer      up to the limit
            -most                                      beyond it

        A buffer above the limit, which the paper has no equation for, counts as the limit: with it
        the shortest answer would be penalised already.

        Args:
            tokens: of the answer.
            limit: that it was sampled with.
        """
        if not self.penalises:
            return 0.0
        buffer = max(1, min(self.buffer, limit))
        return self.most * max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
