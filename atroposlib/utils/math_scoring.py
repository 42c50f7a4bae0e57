"""Whether a mathematical answer equals the expected one, by math_verify over latex2sympy2_extended.

math_verify guards against endless simplification with SIGALRM, which only works in a process's main thread. Environments run
in an event loop, often with threads, so the comparison runs in a child process of its own: there the alarm works, and a child
that hangs all the same is killed and replaced.
"""

import logging
from decimal import Decimal, InvalidOperation

from atroposlib.utils.killable import KillableCalls

logger = logging.getLogger(__name__)

PARSE_SECONDS = 5
KILL_AFTER_SECONDS = 30.0


def as_number(text: str) -> Decimal | None:
    r"""A plain number as people write it (`$1,234.50`, `12\%` without its sign, `-3`), or None.

    >>> as_number("$1,234.50"), as_number("x+1")
    (Decimal('1234.50'), None)
    """
    cleaned = text.strip().replace("\\$", "").replace("$", "").replace("\\,", "").replace("\\!", "").replace(",", "")
    cleaned = cleaned.removesuffix("\\%").removesuffix("%").strip().removesuffix(".")
    try:
        value = Decimal(cleaned)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def equal_in_this_process(gold: str, answer: str) -> bool:
    """Compare two LaTeX expressions; False when either cannot be read. Call it in a process's main thread."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    reading = [
        LatexExtractionConfig(
            boxed_match_priority=0,
            try_extract_without_anchor=False,
            normalization_config=NormalizationConfig(
                basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all", equations=False
            ),
        )
    ]
    expected, given = (parse(rf"\boxed{{{text}}}", reading, parsing_timeout=PARSE_SECONDS) for text in (gold, answer))
    return bool(expected) and bool(given) and bool(verify(expected, given, timeout_seconds=PARSE_SECONDS))


class MathScorer:
    """Compares answers in a child process. Safe to use from several tasks at once; close it at the end."""

    def __init__(self, processes: int = 1) -> None:
        self._children = KillableCalls(processes)

    async def equal(self, gold: str, answer: str) -> bool:
        """Whether `answer` equals `gold`. An expression that takes too long to compare is not equal, and is logged.

        Raises:
            RuntimeError: the child process died twice over the same answer.
        """
        numbers = as_number(gold), as_number(answer)
        if numbers[0] is not None and numbers[1] is not None:
            return numbers[0] == numbers[1]
        if gold.strip() == answer.strip():
            return True
        try:
            return await self._children.call(equal_in_this_process, gold, answer, seconds=KILL_AFTER_SECONDS)
        except TimeoutError:
            logger.warning("comparing took over %.0f s, counted as not equal: %.120r", KILL_AFTER_SECONDS, answer)
            return False

    def close(self) -> None:
        """Stop the child process."""
        self._children.close()
