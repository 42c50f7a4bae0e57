"""Rewards text in tags, such as <think> and <answer>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction, openings
from atroposlib.utils.thinking import TAGS, answer_part, leaves_open

REASONING = frozenset(opening for opening, _ in TAGS)


class FormatReward(RewardFunction):
    """1 for a completion with an opened and closed tag of those wanted, else 0.

    A tag of reasoning that only closes counts: the prompt opened it. Any other tag counts outside
    of the reasoning alone.

    Args:
        preferred_tags: names without brackets; by default think and answer.
        require_all_tags: all of them must be there, not just one.
        case_sensitive: <THINK> is another tag than <think>.
    """

    def __init__(
        self,
        preferred_tags: Sequence[str] | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.preferred_tags = (
            list(preferred_tags) if preferred_tags is not None else ["think", "answer"]
        )
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """1.0 or 0.0 each. Keywords: see `openings`."""
        enough = all if self.require_all_tags else any
        texts = zip(map(self.get_content, completions), openings(completions, kwargs), strict=True)
        return [
            float(enough(self._has(tag, text, opened) for tag in self.preferred_tags))
            for text, opened in texts
        ]

    def _has(self, tag: str, text: str, opened: str) -> bool:
        flags = re.NOFLAG if self.case_sensitive else re.IGNORECASE
        opening, closing = (re.compile(re.escape(f"<{slash}{tag}>"), flags) for slash in ("", "/"))
        if f"<{tag.lower()}>" not in REASONING:
            begin = opening.search(answer := answer_part(text, opened))
            return begin is not None and closing.search(answer, begin.end()) is not None
        whole = opened + text if leaves_open(opened) else text
        begin = opening.search(whole)
        if begin is not None and closing.search(whole, begin.end()) is not None:
            return True
        return closing.search(whole) is not None and not leaves_open(opened)


def format_reward(
    completions: list[Any], preferred_tags: Sequence[str] | None = None, **kwargs: Any
) -> list[float]:
    """See FormatReward, whose options come by keyword."""
    options = {
        key: kwargs[key]
        for key in ("require_all_tags", "case_sensitive", "weight")
        if key in kwargs
    }
    rest = {key: value for key, value in kwargs.items() if key not in options}
    return FormatReward(preferred_tags, **options)(completions, **rest)
