r"""Rewards a right mathematical answer: in \boxed{}, after ####, or as "the answer is $…$"."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from decimal import Decimal
from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction, openings, references
from atroposlib.utils.boxed import boxed_contents, last_boxed
from atroposlib.utils.math_scoring import (
    MathScorer,
    as_number,
    compare_plainly,
    equal_in_this_process,
)
from atroposlib.utils.thinking import answer_part

logger = logging.getLogger(__name__)

AFTER_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
IN_DOLLARS = re.compile(r"\banswer is:?\s*\$([^$\n]+)\$", re.IGNORECASE)
_scorer = MathScorer()
"""Only used outside the main thread, where math_verify cannot set its alarm."""


def final_answers(text: str) -> list[str]:
    """Return the answers that a text ends with: one, several if its boxes differ, none without an answer.

    Boxes that form one list (`\\boxed{1} and \\boxed{2}`) are one answer. A text whose last box is cut off has none.
    """
    contents = boxed_contents(text)
    if contents:
        last = last_boxed(text)
        if last is None:
            return []
        boxed = list(dict.fromkeys(content.strip() for content in contents if content is not None))
        return [last] if len(boxed) == 1 or last == ", ".join(boxed) else boxed
    for pattern in (AFTER_HASHES, IN_DOLLARS):
        if found := pattern.findall(text):
            return [found[-1].strip()]
    return []


def reference_answer(solution: str) -> str:
    """The answer in a reference: its last box, what follows ####, or all of it."""
    answers = final_answers(solution)
    return answers[-1] if answers else solution.strip()


def equal(gold: str, answer: str, tolerance: float) -> bool:
    """Whether two answers are the same number, within an absolute tolerance, or the same
    expression.
    """
    expected, given = as_number(gold), as_number(answer)
    if expected is not None and given is not None:
        return abs(expected - given) <= Decimal(str(tolerance))
    plainly = compare_plainly(gold, answer)
    if plainly is not None:
        return plainly
    if threading.current_thread() is threading.main_thread():
        return equal_in_this_process(gold, answer)
    return asyncio.run(_scorer.equal(gold, answer))


class AccuracyReward(RewardFunction):
    r"""1 for a completion that ends with the right answer, else 0. Different answers in several boxes are wrong.

    Args:
        tolerance: greatest absolute difference of numbers.
        split_on_think_tag: answers inside the reasoning do not count.
        max_boxed_threshold: a completion with more different answers than this is not looked at any further.
    """

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(
        self, completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
    ) -> list[float]:
        """1.0 or 0.0 each.

        Args:
            completions: texts or messages.
            solution: the reference for all, or one for each; may be a worked solution that ends
                with the answer.
            ground_truth: another name for it.
            kwargs: `opened` or `prompts`, see `openings`.

        Raises:
            ValueError: no reference, or not one for each.
        """
        golds = references(solution if solution is not None else ground_truth, len(completions))
        return [
            float(self._is_right(self.get_content(completion), gold, opened))
            for completion, gold, opened in zip(
                completions, golds, openings(completions, kwargs), strict=True
            )
        ]

    def _is_right(self, text: str, gold: str, opened: str) -> bool:
        if self.split_on_think_tag:
            text = answer_part(text, opened)
        answers = final_answers(text)
        if not answers or len(answers) > self.max_boxed_threshold:
            return False
        expected = reference_answer(gold)
        return all(equal(expected, answer, self.tolerance) for answer in answers)


def accuracy_reward(
    completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """See AccuracyReward, whose options come by keyword."""
    options = {
        key: kwargs[key]
        for key in ("tolerance", "split_on_think_tag", "max_boxed_threshold", "weight")
        if key in kwargs
    }
    rest = {key: value for key, value in kwargs.items() if key not in options}
    return AccuracyReward(**options)(
        completions, solution=solution, ground_truth=ground_truth, **rest
    )
