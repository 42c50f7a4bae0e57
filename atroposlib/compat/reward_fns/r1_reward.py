"""Rewards a block of reasoning, followed by a response that contains the answer."""

from __future__ import annotations

import logging
from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction, openings, references
from atroposlib.utils.thinking import read_reasoning

logger = logging.getLogger(__name__)


def parse_reasoning_response(text: str, opened: str = "") -> dict[str, Any]:
    """Split a completion into its reasoning and the rest.

    Args:
        text: the completion.
        opened: what the prompt opened; see `atroposlib.utils.thinking.opened_by`.

    Returns:
        `thinking_content`, empty if the reasoning never ends; `response`; `multiple_thinking`, True
        for several blocks.
    """
    parts = read_reasoning(text, opened)
    return {
        "thinking_content": parts.reasoning.strip() if parts.closed else "",
        "response": parts.answer.strip(),
        "multiple_thinking": len(parts.blocks) > 1,
    }


class FormatReasoningReward(RewardFunction):
    """`reward_value` for one thinking part that is not empty, followed by a response; else 0."""

    def __init__(
        self,
        reward_value: float = 0.5,
        require_thinking: bool = True,
        require_response: bool = True,
        allow_multiple_thinking: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.reward_value = reward_value
        self.require_thinking = require_thinking
        self.require_response = require_response
        self.allow_multiple_thinking = allow_multiple_thinking

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """`reward_value` or 0.0 each. Keywords: see `openings`."""
        texts = zip(map(self.get_content, completions), openings(completions, kwargs), strict=True)
        return [self.reward_value if self._fits(text, opened) else 0.0 for text, opened in texts]

    def _fits(self, text: str, opened: str) -> bool:
        parsed = parse_reasoning_response(text, opened)
        if parsed["multiple_thinking"] and not self.allow_multiple_thinking:
            return False
        has_thinking, has_response = bool(parsed["thinking_content"]), bool(parsed["response"])
        return (has_thinking or not self.require_thinking) and (
            has_response or not self.require_response
        )


class AccuracyXReward(RewardFunction):
    """`reward_value` if the response, without the thinking, contains the reference (or, with
    `exact_match`, is it).
    """

    def __init__(
        self,
        exact_match: bool = False,
        case_sensitive: bool = False,
        reward_value: float = 1.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.exact_match = exact_match
        self.case_sensitive = case_sensitive
        self.reward_value = reward_value

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        """`reward_value` or 0.0 each. Keywords: see `openings`.

        Raises:
            ValueError: no reference, or not one for each.
        """
        golds = references(solution, len(completions))
        scores = []
        for completion, gold, opened in zip(
            completions, golds, openings(completions, kwargs), strict=True
        ):
            response, wanted = (
                parse_reasoning_response(self.get_content(completion), opened)["response"],
                gold.strip(),
            )
            if not self.case_sensitive:
                response, wanted = response.lower(), wanted.lower()
            right = response == wanted if self.exact_match else wanted in response
            scores.append(self.reward_value if right else 0.0)
        return scores


class R1Reward(RewardFunction):
    """Format and accuracy together."""

    def __init__(
        self,
        format_weight: float = 0.5,
        accuracy_weight: float = 1.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.format_reward = FormatReasoningReward(reward_value=1.0, weight=format_weight)
        self.accuracy_reward = AccuracyXReward(weight=accuracy_weight)

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        """The sum of both.

        Raises:
            ValueError: no reference, or not one for each.
        """
        both = (
            self.format_reward(completions, **kwargs),
            self.accuracy_reward(completions, solution=solution, **kwargs),
        )
        return [sum(scores) for scores in zip(*both, strict=True)]


def format_reasoning_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """See FormatReasoningReward."""
    return FormatReasoningReward()(completions, **kwargs)


def accuracy_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """See AccuracyXReward."""
    return AccuracyXReward()(completions, solution=solution, **kwargs)


def r1_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """See R1Reward."""
    return R1Reward()(completions, solution=solution, **kwargs)
