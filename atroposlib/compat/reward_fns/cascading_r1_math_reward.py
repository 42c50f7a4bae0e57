"""A right answer first, then the format: the bonus for thinking in tags is only for right answers."""

from __future__ import annotations

import re
from typing import Any

from atroposlib.compat.reward_fns.accuracy_reward import AccuracyReward
from atroposlib.compat.reward_fns.reward_function import RewardFunction, openings
from atroposlib.inference.responses import read_reasoning
from atroposlib.utils.math_scoring import boxed_contents

FORMAT_BONUS = 0.5
THINK_TAG = re.compile("</?think>")


def is_well_formed(text: str, opened: str = "") -> bool:
    r"""Return True for one block of reasoning that is not empty, and then an answer in \boxed{}."""
    parts = read_reasoning(text, opened)
    if len(parts.blocks) != 1 or parts.opening.strip() or not parts.closed:
        return False
    (thought,), answer = parts.blocks, parts.answer.lstrip()
    tagged = answer.startswith("<answer>") or THINK_TAG.search(thought) or THINK_TAG.search(answer)
    return bool(thought) and not tagged and bool(boxed_contents(answer))


def cascading_r1_math_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """Return 1 for a right answer, plus the format's bonus; else 0."""
    right = AccuracyReward()(completions, solution=solution, **kwargs)
    texts = map(RewardFunction.get_content, completions)
    rows = zip(right, texts, openings(completions, kwargs), strict=True)
    return [
        score + FORMAT_BONUS * (score > 0 and is_well_formed(text, opened))
        for score, text, opened in rows
    ]
