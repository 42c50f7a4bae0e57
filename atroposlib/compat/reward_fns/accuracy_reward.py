r"""Rewards a right mathematical answer: in \boxed{}, after ####, or as "the answer is $…$"."""

from __future__ import annotations

import asyncio
import re
import threading
from decimal import Decimal

from atroposlib.compat.reward_fns.reward_function import TextReward
from atroposlib.inference.responses import answer_part
from atroposlib.utils.math_scoring import (
    MathScorer,
    as_number,
    boxed_contents,
    compare_plainly,
    equal_in_this_process,
    last_boxed,
)

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
        if len(boxed) == 1 or last == ", ".join(boxed):
            return [last]
        return boxed
    for pattern in (AFTER_HASHES, IN_DOLLARS):
        if answers := pattern.findall(text):
            return [answers[-1].strip()]
    return []


def reference_answer(solution: str) -> str:
    """Return the answer in a reference: its last box, the text after ####, or all of it."""
    return [solution.strip(), *final_answers(solution)][-1]


def equal(gold: str, answer: str, tolerance: float) -> bool:
    """Return whether two answers are the same number, within an absolute tolerance, or the same
    expression.
    """
    expected, actual = as_number(gold), as_number(answer)
    if expected is not None and actual is not None:
        return abs(expected - actual) <= Decimal(str(tolerance))
    plainly = compare_plainly(gold, answer)
    if plainly is not None:
        return plainly
    if threading.current_thread() is threading.main_thread():
        return equal_in_this_process(gold, answer)
    return asyncio.run(_scorer.equal(gold, answer))


class AccuracyReward(TextReward):
    r"""1 for a completion that ends with the right answer, else 0. Different answers in several boxes are wrong.

    Args:
        tolerance: greatest absolute difference of numbers.
        split_on_think_tag: answers inside the reasoning do not count.
        max_boxed_threshold: a completion with more different answers than this is not looked at any further.
    """

    needs_reference = True
    tolerance: float = 1e-6
    split_on_think_tag: bool = True
    max_boxed_threshold: int = 6

    def score(self, text: str, gold: str, opened: str) -> float:
        if self.split_on_think_tag:
            text = answer_part(text, opened)
        answers = final_answers(text)
        if not answers or len(answers) > self.max_boxed_threshold:
            return 0.0
        expected = reference_answer(gold)
        return float(all(equal(expected, answer, self.tolerance) for answer in answers))
