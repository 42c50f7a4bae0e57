"""A right answer first, then the format: the bonus for thinking in tags is only for right answers."""

from __future__ import annotations

import logging
import re
from typing import Any

from atroposlib.envs.rewards import accuracy_reward as math_accuracy
from atroposlib.envs.rewards.reward_function import RewardFunction

logger = logging.getLogger(__name__)

FORMAT_BONUS = 0.5
WELL_FORMED = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>\s*(?!<answer>)(?:(?!</?think>).)*\\boxed\s*\{.*", re.DOTALL)


def get_completion_content(completion: Any) -> str:
    """The text of a completion; see RewardFunction.get_content."""
    return RewardFunction.get_content(completion)


def format_reward(completions: list[Any], reward_value: float = FORMAT_BONUS, **kwargs: Any) -> list[float]:
    r"""`reward_value` for thinking in tags followed, outside of any other tag, by an answer in \boxed{}; else 0."""
    return [reward_value if WELL_FORMED.fullmatch(get_completion_content(entry)) else 0.0 for entry in completions]


def accuracy_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """1 for a right answer, else 0; see accuracy_reward.AccuracyReward."""
    return math_accuracy.AccuracyReward()(completions, solution=solution)


def cascading_r1_math_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """Accuracy, plus the format's bonus where the answer is right."""
    right = accuracy_reward(completions, solution)
    bonus = format_reward(completions)
    return [score + extra if score else 0.0 for score, extra in zip(right, bonus, strict=True)]
