"""Rewards visible steps: numbered steps, lists, and words such as "first" and "finally"."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction

logger = logging.getLogger(__name__)

PATTERNS = {
    "numbered_steps": re.compile(r"\bstep\s+\d+\b", re.IGNORECASE),
    "list_numbers": re.compile(r"^\s*\d+\.\s+", re.MULTILINE),
    "bullet_points": re.compile(r"^\s*[-*•]\s+", re.MULTILINE),
    "transition_words": re.compile(
        r"\b(?:first|second|third|fourth|fifth|next|then|afterwards?|after that|subsequently|initially|to begin|lastly|finally"
        r"|eventually|in conclusion)\b",
        re.IGNORECASE,
    ),
}
WEIGHTS = {
    "numbered_steps": 0.5,
    "list_numbers": 0.5,
    "bullet_points": 0.4,
    "transition_words": 0.3,
}


class ReasoningStepsReward(RewardFunction):
    """Between 0 and 1: `base_score` for a text of some length, and for each kind of step its
    weight.

    Args:
        min_words: a shorter text has no base score.
        min_steps: so many steps of a kind earn its full weight; fewer earn a part.
        base_score: for the length.
        pattern_weights: weight of each kind: numbered_steps, list_numbers, bullet_points,
            transition_words.
    """

    def __init__(
        self,
        min_words: int = 10,
        min_steps: int = 3,
        base_score: float = 0.1,
        pattern_weights: Mapping[str, float] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.min_words, self.min_steps, self.base_score = min_words, min_steps, base_score
        self.pattern_weights = (
            dict(pattern_weights) if pattern_weights is not None else dict(WEIGHTS)
        )
        unknown = set(self.pattern_weights) - set(PATTERNS)
        if unknown:
            raise ValueError(
                f"pattern_weights {sorted(unknown)} are not known; there are {', '.join(PATTERNS)}"
            )

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Scores from 0 to 1."""
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        score = self.base_score if len(text.split()) >= self.min_words else 0.0
        for name, weight in self.pattern_weights.items():
            score += weight * min(1.0, len(PATTERNS[name].findall(text)) / max(1, self.min_steps))
        return min(1.0, score)


def reasoning_steps_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """See ReasoningStepsReward, whose options come by keyword."""
    names = ("min_words", "min_steps", "base_score", "pattern_weights", "weight")
    return ReasoningStepsReward(**{key: kwargs[key] for key in names if key in kwargs})(completions)
