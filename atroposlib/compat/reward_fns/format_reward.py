"""Rewards text in tags, such as <think> and <answer>."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atroposlib.compat.reward_fns.reward_function import TextReward
from atroposlib.inference.responses import TAGS, answer_part, leaves_open

REASONING = frozenset(opening for opening, _ in TAGS)


class FormatReward(TextReward):
    """1 for a completion with an opened and closed tag of those wanted, else 0.

    A tag of reasoning that only closes counts: the prompt opened it. Any other tag counts outside
    of the reasoning alone.

    Args:
        preferred_tags: names without brackets; by default think and answer.
        require_all_tags: all of them must be there, not just one.
        case_sensitive: <THINK> is another tag than <think>.
    """

    preferred_tags: Sequence[str] = ("think", "answer")
    require_all_tags: bool = False
    case_sensitive: bool = False

    def score(self, text: str, gold: str, opened: str) -> float:
        present = [self._has(tag, text, opened) for tag in self.preferred_tags]
        if self.require_all_tags:
            return float(all(present))
        return float(any(present))

    def _has(self, tag: str, text: str, opened: str) -> bool:
        flags = re.IGNORECASE
        if self.case_sensitive:
            flags = re.NOFLAG
        opening, closing = (re.compile(re.escape(f"<{slash}{tag}>"), flags) for slash in ("", "/"))
        if f"<{tag.lower()}>" not in REASONING:
            begin = opening.search(answer := answer_part(text, opened))
            return begin is not None and closing.search(answer, begin.end()) is not None
        whole = text
        if leaves_open(opened):
            whole = opened + text
        begin = opening.search(whole)
        if begin is not None and closing.search(whole, begin.end()) is not None:
            return True
        return closing.search(whole) is not None and not leaves_open(opened)
