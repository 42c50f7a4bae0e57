"""Rewards visible steps: numbered steps, lists, and words such as "first" and "finally"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atroposlib.compat.reward_fns.reward_function import TextReward

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


class ReasoningStepsReward(TextReward):
    """Between 0 and 1: `base_score` for a text of some length, and for each kind of step its
    weight.

    Args:
        min_words: a shorter text has no base score.
        min_steps: so many steps of a kind earn its full weight; fewer earn a part.
        base_score: for the length.
        pattern_weights: weight of each kind: numbered_steps, list_numbers, bullet_points,
            transition_words.
    """

    min_words: int = 10
    min_steps: int = 3
    base_score: float = 0.1
    pattern_weights: Mapping[str, float] = WEIGHTS

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        if unknown := self.pattern_weights.keys() - PATTERNS.keys():
            raise ValueError(
                f"pattern_weights {sorted(unknown)} are not known; there are {', '.join(PATTERNS)}"
            )

    def score(self, text: str, gold: str, opened: str) -> float:
        score = self.base_score * (len(text.split()) >= self.min_words)
        for name, weight in self.pattern_weights.items():
            score += weight * min(1.0, len(PATTERNS[name].findall(text)) / max(1, self.min_steps))
        return min(1.0, score)
