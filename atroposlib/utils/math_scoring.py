"""Compare a mathematical answer with the expected one, by math_verify over latex2sympy2_extended.

Plain numbers and equal texts are compared here. Everything else goes to math_verify, which guards
against endless simplification with SIGALRM. That only works in a process's main thread, and
environments run in an event loop, often with threads. The comparison therefore runs in a child
process: there the alarm works, and a child that hangs all the same is killed and replaced.

No answer makes a comparison raise: an answer that cannot be read or compared is not equal.
"""

import logging
import re
from decimal import Decimal

from atroposlib.utils.answer_spelling import (
    choice,
    is_text,
    plain_number,
    spelled,
    time_of_day,
    with_base,
    words_of,
)
from atroposlib.utils.killable import ChildDied, KillableCalls

logger = logging.getLogger(__name__)

PARSE_SECONDS = 5
KILL_AFTER_SECONDS = 30.0
PROCESSES = 2
MAX_NUMBER_CHARACTERS = 1000
MAX_EXPRESSION_CHARACTERS = 2000
"""A longer answer equals nothing but the same text: parsing it would take minutes."""

_CURRENCY = r"(?:\\?\$\s*|[€£¥₹]\s*)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*{_CURRENCY}*(?P<inner>[+-]?)"
    r"(?P<digits>(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?P<exponent>[eE][+-]?[0-9]{1,3})?"
    rf"\s*{_CURRENCY}*\.?"
)
_SPELLINGS = str.maketrans(
    "０１２３４５６７８９，．－＋−–‐‑\u00a0\u2009\u202f", "0123456789,.-+----   "
)
_LATEX_COMMA = re.compile(r",\\!|\{,\}|\\,")
_SPACE_IN_LIST = re.compile(r"\s*,\s*")


def as_number(text: str) -> Decimal | None:
    r"""Return a plain number as people write it (`$1,234.50`, `-3`, `1e5`), or None for everything else.

    A comma or a space separates thousands only in its places: `1,234` and `1 234` are numbers, `1,2` is two.
    LaTeX's spellings of the comma (`1{,}234`, `1,\!234`, `1\,234`) and full-width digits are read too. Percent
    signs, underscores and units make no plain number.

    >>> as_number("$1,234.50"), as_number("1,2"), as_number("5%")
    (Decimal('1234.50'), None, None)
    """
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    cleaned = _LATEX_COMMA.sub(",", text.translate(_SPELLINGS)).strip()
    match = _NUMBER.fullmatch(cleaned)
    if match is None or (match["sign"] and match["inner"]):
        return None
    sign = match["sign"] or match["inner"]
    return Decimal(f"{sign}{re.sub('[, ]', '', match['digits'])}{match['exponent'] or ''}")


def number_in(answer: str) -> Decimal | None:
    r"""Return the number that an answer gives, with or without a unit; None if it is not one number.

    >>> number_in(r"42\text{ apples}"), number_in("x = 4"), number_in("4 or 5")
    (Decimal('42'), None, None)
    """
    number = as_number(answer)
    if number is None and len(answer) <= MAX_NUMBER_CHARACTERS:
        return as_number(plain_number(spelled(answer)))
    return number


def compare_plainly(gold: str, answer: str) -> bool | None:
    """Compare two answers that need no algebra; None if math_verify must decide.

    These are plain numbers, with or without a unit, numbers with a base, words, times of the day,
    letters of choices, equal texts, and texts that are too long.

    >>> compare_plainly("1,000", "1000.0"), compare_plainly("3, 5", "3,5"), compare_plainly("2", "4/2")
    (True, True, None)
    """
    numbers = as_number(gold), as_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    texts = [_SPACE_IN_LIST.sub(",", text.strip()) for text in (gold, answer)]
    if texts[0] == texts[1]:
        return bool(texts[0])
    if not all(texts) or max(len(gold), len(answer)) > MAX_EXPRESSION_CHARACTERS:
        return False
    return _compare_spelled(gold, answer)


def _compare_spelled(gold: str, answer: str) -> bool | None:
    """Compare the spellings of two answers; None if math_verify must decide."""
    times = time_of_day(gold), time_of_day(answer)
    if None not in times and times[0] != times[1]:
        return False
    one, other = spelled(gold), spelled(answer)
    if one and one == other:
        return True
    numbers = as_number(plain_number(one)), as_number(plain_number(other))
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    based = with_base(one), with_base(other)
    if None not in based:
        return based[0] == based[1]
    words = words_of(one), words_of(other)
    if None not in words and (words[0] == words[1] or is_text(one) or is_text(other)):
        return words[0] == words[1]
    return _compare_choices(one, other)


def _compare_choices(one: str, other: str) -> bool | None:
    """Compare two answers of which one is a labelled choice; None if the contents must decide."""
    choices = choice(one), choice(other)
    if choices[0] is not None and choices[1] is not None:
        if choices[0][0] != choices[1][0]:
            return False
        if not (choices[0][1] and choices[1][1]):
            return True
    return None


def _content(text: str) -> str:
    """Return an answer in one spelling, without the label of a choice."""
    text = spelled(text)
    labelled = choice(text)
    if labelled is None or not labelled[1]:
        return text
    return spelled(labelled[1])


def equal_in_this_process(gold: str, answer: str) -> bool:
    """Compare two LaTeX expressions; False if either cannot be read.

    Call it in a process's main thread.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    reading = [
        LatexExtractionConfig(
            boxed_match_priority=0,
            try_extract_without_anchor=False,
            normalization_config=NormalizationConfig(
                basic_latex=True,
                units=False,
                malformed_operators=True,
                nits=True,
                boxed="all",
                equations=False,
            ),
        )
    ]
    try:
        expected, parsed = (
            parse(rf"\boxed{{{_content(text)}}}", reading, parsing_timeout=PARSE_SECONDS)
            for text in (gold, answer)
        )
        return (
            bool(expected)
            and bool(parsed)
            and bool(verify(expected, parsed, timeout_seconds=PARSE_SECONDS))
        )
    except Exception as error:  # noqa: BLE001  # the parser and SymPy raise anything over what a model wrote
        logger.debug("%.120r could not be compared with %.120r: %s", answer, gold, error)
        return False


class MathScorer:
    """Compares answers in child processes. Tasks may share it; close it at the end.

    Args:
        processes: comparisons at the same time, those that have become slow not counted.
    """

    def __init__(self, processes: int = PROCESSES) -> None:
        self._children = KillableCalls(processes)

    async def equal(self, gold: str, answer: str) -> bool:
        """Return whether `answer` equals `gold`.

        An expression that takes too long to compare, or kills its child process, is not equal, and
        is logged.

        Raises:
            StartFailed: no child process could be started.
        """
        plainly = compare_plainly(gold, answer)
        if plainly is not None:
            return plainly
        try:
            return await self._children.call(
                equal_in_this_process, gold, answer, seconds=KILL_AFTER_SECONDS
            )
        except TimeoutError:
            reason = f"took over {KILL_AFTER_SECONDS:.0f} s"
        except ChildDied:
            reason = "ended its process twice"
        logger.warning("comparing an answer %s; it counts as not equal: %.120r", reason, answer)
        return False

    def close(self) -> None:
        """Stop the child processes."""
        self._children.close()
