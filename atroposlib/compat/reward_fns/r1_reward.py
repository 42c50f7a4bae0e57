"""Rewards a block of reasoning, followed by a response that contains the answer."""

from __future__ import annotations

from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction, TextReward
from atroposlib.inference.responses import read_reasoning


def parse_reasoning_response(text: str, opened: str = "") -> dict[str, Any]:
    """Split a completion into its reasoning and the rest.

    Args:
        text: the completion.
        opened: what the prompt opened; see `atroposlib.inference.responses.opened_by`.

    Returns:
        `thinking_content`, empty if the reasoning never ends; `response`; `multiple_thinking`, True
        for several blocks.
    """
    parts, thinking = read_reasoning(text, opened), ""
    if parts.closed:
        thinking = parts.reasoning.strip()
    return {
        "thinking_content": thinking,
        "response": parts.answer.strip(),
        "multiple_thinking": len(parts.blocks) > 1,
    }


class FormatReasoningReward(TextReward):
    """`reward_value` for one thinking part that is not empty, followed by a response; else 0."""

    reward_value: float = 0.5
    require_thinking: bool = True
    require_response: bool = True
    allow_multiple_thinking: bool = False

    def score(self, text: str, gold: str, opened: str) -> float:
        parsed = parse_reasoning_response(text, opened)
        fits = (
            (parsed["thinking_content"] or not self.require_thinking)
            and (parsed["response"] or not self.require_response)
            and (self.allow_multiple_thinking or not parsed["multiple_thinking"])
        )
        return self.reward_value * bool(fits)


class AccuracyXReward(TextReward):
    """`reward_value` if the response, without the thinking, contains the reference (or, with
    `exact_match`, is it).
    """

    needs_reference = True
    exact_match: bool = False
    case_sensitive: bool = False
    reward_value: float = 1.0

    def score(self, text: str, gold: str, opened: str) -> float:
        response, gold = parse_reasoning_response(text, opened)["response"], gold.strip()
        if not self.case_sensitive:
            response, gold = response.lower(), gold.lower()
        right = gold in response
        if self.exact_match:
            right = gold == response
        return self.reward_value * right


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
