"""Rewards thinking in <think> tags, followed by a response that contains the answer."""

from __future__ import annotations

import logging
import re
from typing import Any

from atroposlib.envs.rewards.reward_function import RewardFunction, references

logger = logging.getLogger(__name__)

THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def parse_reasoning_response(text: str) -> dict[str, Any]:
    """Split a text into `thinking_content` and `response`. With several thinking parts, all of it is the response."""
    found = list(THINKING.finditer(text))
    if len(found) != 1:
        return {"thinking_content": "", "response": text, "multiple_thinking": len(found) > 1}
    return {"thinking_content": found[0][1].strip(), "response": text[found[0].end() :].strip(), "multiple_thinking": False}


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
        """`reward_value` or 0.0 each."""
        return [self.reward_value if self._fits(self.get_content(completion)) else 0.0 for completion in completions]

    def _fits(self, text: str) -> bool:
        parsed = parse_reasoning_response(text)
        thinking, response = parsed["thinking_content"], parsed["response"]
        if parsed["multiple_thinking"]:
            if not self.allow_multiple_thinking:
                return False
            parts = list(THINKING.finditer(text))
            thinking, response = "".join(part[1] for part in parts).strip(), text[parts[-1].end() :].strip()
        return bool((thinking or not self.require_thinking) and (response or not self.require_response))


class AccuracyXReward(RewardFunction):
    """`reward_value` if the response, without the thinking, contains the reference (or, with `exact_match`, is it)."""

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
        """`reward_value` or 0.0 each.

        Raises:
            ValueError: no reference, or not one for each.
        """
        golds = references(solution, len(completions))
        scores = []
        for completion, gold in zip(completions, golds, strict=True):
            response, wanted = parse_reasoning_response(self.get_content(completion))["response"].strip(), gold.strip()
            if not self.case_sensitive:
                response, wanted = response.lower(), wanted.lower()
            right = response == wanted if self.exact_match else wanted in response
            scores.append(self.reward_value if right else 0.0)
        return scores


class R1Reward(RewardFunction):
    """Format and accuracy together."""

    def __init__(self, format_weight: float = 0.5, accuracy_weight: float = 1.0, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.format_reward = FormatReasoningReward(reward_value=1.0, weight=format_weight)
        self.accuracy_reward = AccuracyXReward(weight=accuracy_weight)

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        """The sum of both.

        Raises:
            ValueError: no reference, or not one for each.
        """
        both = (self.format_reward(completions), self.accuracy_reward(completions, solution=solution))
        return [sum(scores) for scores in zip(*both, strict=True)]


def format_reasoning_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """See FormatReasoningReward."""
    return FormatReasoningReward()(completions)


def accuracy_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """See AccuracyXReward."""
    return AccuracyXReward()(completions, solution=solution)


def r1_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """See R1Reward."""
    return R1Reward()(completions, solution=solution)
