"""Rewards text in tags, such as <think> and <answer>."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.rewards.reward_function import RewardFunction

logger = logging.getLogger(__name__)


class FormatReward(RewardFunction):
    """1 for a completion with an opened and closed tag of those wanted, else 0.

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
        self.preferred_tags = list(preferred_tags) if preferred_tags is not None else ["think", "answer"]
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """1.0 or 0.0 each."""
        flags = re.DOTALL | (0 if self.case_sensitive else re.IGNORECASE)
        patterns = [re.compile(f"<{re.escape(tag)}>.*?</{re.escape(tag)}>", flags) for tag in self.preferred_tags]
        enough = all if self.require_all_tags else any
        texts = [self.get_content(completion) for completion in completions]
        return [float(enough(pattern.search(text) is not None for pattern in patterns)) for text in texts]


def format_reward(completions: list[Any], preferred_tags: Sequence[str] | None = None, **kwargs: Any) -> list[float]:
    """See FormatReward, whose options come by keyword."""
    options = {key: kwargs[key] for key in ("require_all_tags", "case_sensitive", "weight") if key in kwargs}
    return FormatReward(preferred_tags, **options)(completions)
