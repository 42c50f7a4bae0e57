"""Rewards answers to crossword clues in the form `3-Across: WORD`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atroposlib.compat.reward_fns.reward_function import TextReward
from atroposlib.inference.responses import answer_part

CLUE = r"\d+-(?:Across|Down):\s+(?P<word>[A-Z ]+)"
DEFAULT_PATTERNS = (re.compile(CLUE, re.IGNORECASE),)


class CrosswordFormatReward(TextReward):
    """`reward_value` for a completion with one of the patterns outside of its reasoning, else 0.

    Args:
        format_patterns: compiled; the group `word`, if a pattern has it, is what is checked for
            invalid characters.
        reward_value: for a completion that fits.
        penalize_invalid_chars: no reward if an answer has other characters than `valid_chars` and
            spaces.
        valid_chars: capitals; lower case counts alike.
    """

    format_patterns: Sequence[re.Pattern[str]] = DEFAULT_PATTERNS
    reward_value: float = 1.0
    penalize_invalid_chars: bool = True
    valid_chars: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

    def score(self, text: str, gold: str, opened: str) -> float:
        return self.reward_value * self._fits(answer_part(text, opened))

    def _fits(self, text: str) -> bool:
        matches = [match for pattern in self.format_patterns for match in pattern.finditer(text)]
        if not matches or not self.penalize_invalid_chars:
            return bool(matches)
        answers = "".join(match.groupdict().get("word") or "" for match in matches)
        return set(answers.upper()) <= set(self.valid_chars) | {" ", "\n"}
