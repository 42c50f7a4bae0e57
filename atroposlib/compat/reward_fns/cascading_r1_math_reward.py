"""A right answer first, then the format: the bonus for thinking in tags is only for right answers."""

from __future__ import annotations

import re
from typing import Any

from atroposlib.compat.reward_fns import accuracy_reward as math_accuracy
from atroposlib.compat.reward_fns.reward_function import RewardFunction, openings
from atroposlib.utils.boxed import boxed_contents
from atroposlib.utils.thinking import read_reasoning

FORMAT_BONUS = 0.5
THINK_TAG = re.compile("</?think>")


def get_completion_content(completion: Any) -> str:
    """The text of a completion; see RewardFunction.get_content."""
    return RewardFunction.get_content(completion)


def format_reward(
    completions: list[Any], reward_value: float = FORMAT_BONUS, **kwargs: Any
) -> list[float]:
    r"""`reward_value` for one block of reasoning followed, outside of any other tag, by an answer in \boxed{}; else 0."""
    texts = zip(
        map(get_completion_content, completions), openings(completions, kwargs), strict=True
    )
    return [reward_value if is_well_formed(text, opened) else 0.0 for text, opened in texts]


def is_well_formed(text: str, opened: str = "") -> bool:
    r"""Return True for one block of reasoning that is not empty, and then an answer in \boxed{}."""
    parts = read_reasoning(text, opened)
    if len(parts.blocks) != 1 or parts.opening.strip() or not parts.closed:
        return False
    (thought,), answer = parts.blocks, parts.answer.lstrip()
    tagged = answer.startswith("<answer>") or THINK_TAG.search(thought) or THINK_TAG.search(answer)
    return bool(thought) and not tagged and bool(boxed_contents(answer))


def accuracy_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """1 for a right answer, else 0; see accuracy_reward.AccuracyReward."""
    return math_accuracy.AccuracyReward()(completions, solution=solution, **kwargs)


def cascading_r1_math_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """Accuracy, plus the format's bonus where the answer is right."""
    right = accuracy_reward(completions, solution, **kwargs)
    bonus = format_reward(completions, **kwargs)
    return [score + extra if score else 0.0 for score, extra in zip(right, bonus, strict=True)]
