"""The built-in rewards: right answers, formats, visible steps, repetition and meaning.

Only `CosineScaledReward` loads PyTorch, through transformers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from atroposlib.compat.reward_fns.registry import RewardFunction, TextReward, openings
from atroposlib.inference.responses import TAGS, answer_part, leaves_open, read_reasoning
from atroposlib.utils.math_scoring import (
    MathScorer,
    as_number,
    boxed_contents,
    compare_plainly,
    last_boxed,
)

AFTER_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
IN_DOLLARS = re.compile(r"\banswer is:?\s*\$([^$\n]+)\$", re.IGNORECASE)
_scorer = MathScorer()


def final_answers(text: str) -> list[str]:
    """Return the answers that a text ends with: one, several if its boxes differ, none without an answer.

    Boxes that form one list (`\\boxed{1} and \\boxed{2}`) are one answer. A text whose last box is cut off has none.
    """
    contents = boxed_contents(text)
    if contents:
        last = last_boxed(text)
        if last is None:
            return []
        filled = (content.strip() for content in contents if content and content.strip())
        boxed = list(dict.fromkeys(filled))
        if len(boxed) <= 1 or last == ", ".join(boxed):
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

    A gold number no larger than the tolerance must be met to a thousandth, or every small number
    and 0 would equal it.

    A child process compares expressions, within bounds of time and memory. A script that grades
    needs `if __name__ == "__main__":`, because a child imports the script.

    Raises:
        StartFailed: no child process could be started.
    """
    expected, actual = as_number(gold), as_number(answer)
    if expected is not None and actual is not None:
        allowed = Decimal(str(tolerance))
        if 0 < abs(expected) <= allowed:
            allowed = abs(expected) / 1000
        return abs(expected - actual) <= allowed
    plainly = compare_plainly(gold, answer)
    if plainly is not None:
        return plainly
    # This thread may already run an event loop, and a thread cannot run two.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _scorer.equal(gold, answer)).result()


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


CLUE = r"\d+-(?:Across|Down):\s+(?P<word>[A-Z ]+)"
DEFAULT_PATTERNS = (re.compile(CLUE, re.IGNORECASE),)


class CrosswordFormatReward(TextReward):
    """`reward_value` for a completion with one of the patterns outside of its reasoning, else 0.

    Args:
        format_patterns: compiled; the group `word`, if a pattern has it, is what is checked for
            invalid characters.
        reward_value: for a completion that fits.
        penalize_invalid_chars: no reward if an answer has other characters than `valid_chars` and
            spaces.
        valid_chars: capitals; lower case counts alike.
    """

    format_patterns: Sequence[re.Pattern[str]] = DEFAULT_PATTERNS
    reward_value: float = 1.0
    penalize_invalid_chars: bool = True
    valid_chars: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

    def score(self, text: str, gold: str, opened: str) -> float:
        return self.reward_value * self._fits(answer_part(text, opened))

    def _fits(self, text: str) -> bool:
        matches = [match for pattern in self.format_patterns for match in pattern.finditer(text)]
        if not matches or not self.penalize_invalid_chars:
            return bool(matches)
        answers = "".join(match.groupdict().get("word") or "" for match in matches)
        return set(answers.upper()) <= set(self.valid_chars) | {" ", "\n"}


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


STEP_PATTERNS = {
    "numbered_steps": re.compile(r"\bstep\s+\d+\b", re.IGNORECASE),
    "list_numbers": re.compile(r"^\s*\d+\.\s+", re.MULTILINE),
    "bullet_points": re.compile(r"^\s*[-*•]\s+", re.MULTILINE),
    "transition_words": re.compile(
        r"\b(?:first|second|third|fourth|fifth|next|then|afterwards?|after that|subsequently|initially|to begin|lastly|finally"
        r"|eventually|in conclusion)\b",
        re.IGNORECASE,
    ),
}
STEP_WEIGHTS = {
    "numbered_steps": 0.5,
    "list_numbers": 0.5,
    "bullet_points": 0.4,
    "transition_words": 0.3,
}


class ReasoningStepsReward(TextReward):
    """Between 0 and 1: `base_score` for a text of some length, and for each kind of step its
    weight.

    Args:
        min_words: a shorter text has no base score.
        min_steps: so many steps of a kind earn its full weight; fewer earn a part.
        base_score: for the length.
        pattern_weights: weight of each kind: numbered_steps, list_numbers, bullet_points,
            transition_words.
    """

    min_words: int = 10
    min_steps: int = 3
    base_score: float = 0.1
    pattern_weights: Mapping[str, float] = STEP_WEIGHTS

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        if unknown := self.pattern_weights.keys() - STEP_PATTERNS.keys():
            raise ValueError(
                f"pattern_weights {sorted(unknown)} are not known; there are {', '.join(STEP_PATTERNS)}"
            )

    def score(self, text: str, gold: str, opened: str) -> float:
        score = self.base_score * (len(text.split()) >= self.min_words)
        for name, weight in self.pattern_weights.items():
            score += weight * min(
                1.0, len(STEP_PATTERNS[name].findall(text)) / max(1, self.min_steps)
            )
        return min(1.0, score)


FAULT_WEIGHTS = {
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

    Four shares between 0 and 1 are measured. Two are of words (without stopwords) and of phrases of
    three words that were there before. Two are of sentences: equal to the one before, or with the
    beginning of an earlier one. Shares above the threshold are weighted and added. Paragraphs that
    are there twice cost `paragraph_repetition_base_penalty` times their share.

    Args:
        threshold: shares up to this cost nothing.
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
    component_weights: Mapping[str, float] = FAULT_WEIGHTS
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


MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class CosineScaledReward(TextReward):
    """1 - `scale_factor` · (1 - cos(completion, reference)), within `min_reward` and `max_reward`.

    Args:
        model_name: embedding model, by name or folder.
        scale_factor: how much a difference in meaning costs; the cosine itself with 1.
        min_reward, max_reward: limits.
        default_reward: taken for compatibility; a reward that cannot be computed raises.

    Raises:
        ImportError: the model or PyTorch cannot be had.
    """

    needs_reference = True
    model_name: str = MODEL
    scale_factor: float = 1.0
    min_reward: float = -1.0
    max_reward: float = 1.0
    default_reward: float = 0.0

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        embedding_model(self.model_name)

    def score(self, text: str, gold: str, opened: str) -> float:
        likeness = cosine(*self._embeddings((text, gold)))
        scaled = 1.0 - (1.0 - likeness) * self.scale_factor
        return min(self.max_reward, max(self.min_reward, scaled))

    def _embeddings(self, texts: tuple[str, ...]) -> list[np.ndarray]:
        """[hidden] float for each text: the mean over its tokens."""
        tokenizer, model = embedding_model(self.model_name)
        vectors = []
        for text in texts:
            fields = tokenizer(text, truncation=True, return_tensors="pt")
            hidden = model(**fields)[0].detach().numpy()[0]
            vectors.append(np.asarray(hidden.mean(axis=0), dtype=np.float64))
        return vectors


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no length."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


@cache
def embedding_model(name: str) -> tuple[Any, Any]:
    """Tokenizer and model, loaded once for each process.

    Raises:
        ImportError: they cannot be loaded; the message names the missing package.
    """
    from transformers import AutoModel, AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ImportError(
            f"reward cosine_scaled: no embedding model {name!r}: {reason}; give a folder as model_name"
        ) from error
