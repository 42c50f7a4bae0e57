"""Rewards answers to crossword clues in the form `3-Across: WORD`."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction, openings
from atroposlib.utils.thinking import answer_part

logger = logging.getLogger(__name__)

CLUE = r"\d+-(?:Across|Down):\s+(?P<word>[A-Z ]+)"
DEFAULT_PATTERNS = (re.compile(CLUE, re.IGNORECASE),)


class CrosswordFormatReward(RewardFunction):
    """`reward_value` for a completion with one of the patterns outside of its reasoning, else 0.

    Args:
        format_patterns: compiled; the group `word`, if a pattern has it, is what is checked for
            invalid characters.
        reward_value: for a completion that fits.
        penalize_invalid_chars: no reward if an answer has other characters than `valid_chars` and
            spaces.
        valid_chars: capitals; lower case counts alike.
    """

    def __init__(
        self,
        format_patterns: Sequence[re.Pattern[str]] | None = None,
        reward_value: float = 1.0,
        penalize_invalid_chars: bool = True,
        valid_chars: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.format_patterns = list(format_patterns or DEFAULT_PATTERNS)
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = valid_chars

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """`reward_value` or 0.0 each. Keywords: see `openings`."""
        texts = zip(map(self.get_content, completions), openings(completions, kwargs), strict=True)
        return [
            self.reward_value if self._fits(answer_part(text, opened)) else 0.0
            for text, opened in texts
        ]

    def _fits(self, text: str) -> bool:
        found = [match for pattern in self.format_patterns for match in pattern.finditer(text)]
        if not found or not self.penalize_invalid_chars:
            return bool(found)
        answers = "".join(match.groupdict().get("word") or "" for match in found)
        return set(answers.upper()) <= set(self.valid_chars) | {" ", "\n"}


def crossword_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """See CrosswordFormatReward, whose options come by keyword."""
    names = ("format_patterns", "reward_value", "penalize_invalid_chars", "valid_chars", "weight")
    options = {key: kwargs[key] for key in names if key in kwargs}
    rest = {key: value for key, value in kwargs.items() if key not in options}
    return CrosswordFormatReward(**options)(completions, **rest)
