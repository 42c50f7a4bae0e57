"""A penalty for text that repeats itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from atroposlib.compat.reward_fns.reward_function import TextReward

WEIGHTS = {
    "word_repetition": 0.3,
    "phrase_repetition": 0.4,
    "consecutive_repetition": 0.6,
    "beginning_repetition": 0.5,
}
STOPWORDS = frozenset(
    """
    a an and are as at be but by for from had has have he her his i if in is it its of on or she
    so that the their them then there they this to was we were what when which who will with you
    your not no do does did can could would should
    """.split()  # noqa: SIM905
)
PHRASE = 3
"""Words in a phrase, and at the beginning of a sentence."""


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)?", text.lower())


def repeated(items: Sequence[Any]) -> float:
    """The share of items that were there before."""
    return 1 - len(set(items)) / len(items) if items else 0.0


class RepetitionPenaltyReward(TextReward):
    """Between -1 (repeats itself all the time) and 0 (does not).

    Four shares between 0 and 1 are measured: of words (without stopwords) and phrases of three
    words that were there before, of sentences that are the same as the one before, and of sentences
    that begin as an earlier one does. Those above the threshold are weighted and added. Paragraphs
    that are there twice cost `paragraph_repetition_base_penalty` times their share.

    Args:
        threshold: shares up to this are no fault.
        min_words, min_sentences: below either, a text gets `short_text_penalty`.
        short_text_penalty: for a text too short to judge.
        paragraph_repetition_base_penalty: for repeated paragraphs.
        component_weights: word_repetition, phrase_repetition, consecutive_repetition,
            beginning_repetition.
        stopwords: words that may be repeated.
    """

    threshold: float = 0.05
    min_words: int = 10
    min_sentences: int = 2
    short_text_penalty: float = -0.1
    paragraph_repetition_base_penalty: float = -0.6
    component_weights: Mapping[str, float] = WEIGHTS
    stopwords: Collection[str] = STOPWORDS

    def score(self, text: str, gold: str, opened: str) -> float:
        sentences = [words(part) for part in re.split(r"[.!?\n]+", text) if words(part)]
        all_words = [word for sentence in sentences for word in sentence]
        if len(all_words) < self.min_words or len(sentences) < self.min_sentences:
            return self.short_text_penalty
        long_enough = [sentence for sentence in sentences if len(sentence) >= PHRASE]
        shares = {
            "word_repetition": repeated([word for word in all_words if word not in self.stopwords]),
            "phrase_repetition": repeated(
                list(zip(*(all_words[skip:] for skip in range(PHRASE)), strict=False))
            ),
            "consecutive_repetition": sum(a == b for a, b in pairwise(sentences))
            / (len(sentences) - 1 or 1),
            "beginning_repetition": repeated(
                [tuple(sentence[:PHRASE]) for sentence in long_enough]
            ),
        }
        penalty = sum(
            self.component_weights.get(name, 0.0) * share
            for name, share in shares.items()
            if share > self.threshold
        )
        paragraphs = [tuple(words(part)) for part in re.split(r"\n\s*\n", text) if words(part)]
        total = repeated(paragraphs) * self.paragraph_repetition_base_penalty - penalty
        return max(-1.0, min(0.0, total))
