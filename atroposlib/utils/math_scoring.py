r"""Read the answer in `\boxed{…}`, and compare it with the expected one, by math_verify over
latex2sympy2_extended.

Plain numbers and equal texts are compared here. Everything else goes to math_verify, which guards
against endless simplification with SIGALRM. That only works in a process's main thread, and
environments run in an event loop, often with threads. The comparison therefore runs in a child
process: there the alarm works, and a child that hangs all the same is killed and replaced.

No answer makes a comparison raise: an answer that cannot be read or compared is not equal.

The middle of the file gives one spelling to answers that mean the same: units, currencies,
typographic characters. Every rule keeps the meaning. The result is LaTeX for math_verify, whose own
removal of units is not used: it takes the variable of `3m` or of `x^2+3t` for a unit.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from decimal import Decimal

from atroposlib.utils.processes import ChildDied, KillableCalls

# ---- the answer in `\boxed{…}` or `\fbox{…}` ----

# The rules, which docs/grading.md repeats:
#
# - Braces inside a box are balanced; escaped braces do not count.
# - `\boxed 5`, without braces, holds everything up to the next space or `$`, without punctuation
#   behind it.
# - A box inside a box counts as its content.
# - The last box is the answer. Several boxes that only `,`, `;`, "and" or "or" separate are one list.
# - If the last box is never closed, the response was cut off and has no answer.
#
# Every function reads a text once, from left to right, so that megabytes of open braces cost no more
# than other text.

_BOX = r"(?:boxed|fbox)(?![A-Za-z])"
_TOKEN = re.compile(rf"(?P<box>\\{_BOX})|\\(?!\\{_BOX}).|[{{}}]", re.DOTALL)
r"""A box, an escaped character, or a brace. `\\boxed` is a box that was escaped twice."""
_OPENED = re.compile(r"\s*\{")
_BARE = re.compile(r"\s*((?:[^\s${}]|\{[^{}]*\})+)")
_LIST_SEPARATOR = re.compile(
    r"(?:[\s$&]|\\[()\[\]! ]|\\q?quad|\\[,;]|(?P<separator>[,;]|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\}))*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Box:
    """The place of one box in a text, as indices.

    Attributes:
        start: its backslash.
        inside: the first character of its content.
        inside_end: the character behind its content; None if its brace is never closed.
        end: the character behind the box; None if its brace is never closed.
    """

    start: int
    inside: int
    inside_end: int | None = None
    end: int | None = None


def find_boxes(text: str) -> list[Box]:
    """Return every box of a text by its start, those inside other boxes too."""
    boxes: list[Box] = []
    opened: list[Box | None] = []  # one entry per open brace; None for a plain one
    position = 0
    while token := _TOKEN.search(text, position):
        position = token.end()
        if token["box"]:
            if brace := _OPENED.match(text, position):
                position = brace.end()
                opened.append(Box(token.start(), position))
            elif bare := _BARE.match(text, position):
                length = max(1, len(bare[1].rstrip(".,;:!?")))
                position = bare.start(1) + length
                boxes.append(Box(token.start(), bare.start(1), position, position))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()) is not None:
            boxes.append(Box(box.start, box.inside, token.start(), position))
    boxes.extend(box for box in opened if box is not None)
    return sorted(boxes, key=lambda box: box.start)


def _outermost(boxes: list[Box]) -> list[int]:
    """Return the indices of the boxes that are not inside another closed box."""
    kept: list[int] = []
    covered = 0
    for index, box in enumerate(boxes):
        if box.start >= covered:
            kept.append(index)
            covered = box.end or covered
    return kept


def boxed_contents(text: str) -> list[str | None]:
    r"""Return the content of every outermost box, in order; None for a box that is never closed.

    >>> boxed_contents(r"so \boxed{\frac{1}{2}} or \boxed{3")
    ['\\frac{1}{2}', None]
    """
    boxes = find_boxes(text)
    outermost = (boxes[index] for index in _outermost(boxes))
    return [None if box.end is None else text[box.inside : box.inside_end] for box in outermost]


def last_boxed(text: str) -> str | None:
    r"""Return the answer that the last box gives, without surrounding space; None without an answer.

    >>> last_boxed(r"first \boxed{1}, then \boxed{7}"), last_boxed(r"\boxed{1} and \boxed{7}")
    ('7', '1, 7')
    >>> last_boxed(r"\boxed{1} no, \boxed{7")  # cut off
    """
    boxes = find_boxes(text)
    outermost = _outermost(boxes)
    if not outermost or boxes[outermost[-1]].end is None:
        return None
    answers = [_innermost_content(text, boxes, outermost[-1])]
    for earlier, later in zip(reversed(outermost[:-1]), reversed(outermost), strict=False):
        end = boxes[earlier].end
        if end is None or not _is_list(text, end, boxes[later].start):
            break
        answers.append(_innermost_content(text, boxes, earlier))
    return ", ".join(dict.fromkeys(reversed(answers)))


def _innermost_content(text: str, boxes: list[Box], index: int) -> str:
    """Return the content of a box; if that is nothing but another box, the content of the latter."""
    box = boxes[index]
    while index + 1 < len(boxes):
        index += 1
        inner = boxes[index]
        if inner.end is None or inner.end > (box.inside_end or 0):
            break
        if text[box.inside : inner.start].strip() or text[inner.end : box.inside_end].strip():
            break
        box = inner
    return text[box.inside : box.inside_end].strip()


def _is_list(text: str, start: int, end: int) -> bool:
    """Return whether the text from `start` to `end` only separates two entries of a list."""
    between = _LIST_SEPARATOR.fullmatch(text, start, end)
    return between is not None and between["separator"] is not None


def is_well_formed(text: str) -> bool:
    """Return whether there is exactly one box, closed and not empty."""
    contents = boxed_contents(text)
    return len(contents) == 1 and contents[0] is not None and bool(contents[0].strip())


# ---- one spelling for answers that mean the same ----

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u3000", " ")
    | dict.fromkeys("\u200b\u2060\ufeff", "")
    | {
        "−": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "±": r"\pm ",
    }
    | {
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "°": r"^\circ ",
        "⁄": "/",
        "⟨": "(",
        "⟩": ")",
    }
    | {
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
    }
    | {"²": "^{2}", "³": "^{3}", "⁴": "^{4}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta "}
)
_TEXT_COMMAND = (
    r"\\(?:text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname|boldsymbol)"
)
_WHOLE_TEXT = re.compile(rf"{_TEXT_COMMAND}\s*\{{([^{{}}]*)\}}")
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√\s*", r"\\sqrt"),
        (r"\\sqrt\s*(\[[^\[\]]*\])\s*([A-Za-z0-9])", r"\\sqrt\1{\2}"),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", " "),
        (r"(?<!\\)\\[ ,:;]|~(?!=)|\\q?quad(?![A-Za-z])", " "),
        (r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
        (r"\\+$", ""),
        (r"(?<=\d)\s*\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?", ""),
        (r"((?<!1)1(?=st)|(?<!1)2(?=nd)|(?<!1)3(?=rd)|\d(?=th))(?:st|nd|rd|th)(?![A-Za-z])", r"\1"),
        (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?)0*(\d+)(?![\w.])", r"\1\\times 10^{\2\3}"),
        (r"\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"[€£¥₹]|\\?\$|\\(?:textdollar|texteuro|euro|pounds)(?![A-Za-z])", ""),
        (r"(?:\\text\s*\{\s*|\b)per\s?cent\s*\}?\s*$", r"\\%"),
        (
            r"(\^\s*\{?\s*\\circ\s*\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*[CFK]\s*\}|[CF])(?![A-Za-z])",
            r"\1",
        ),
        (r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    )
)
_WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\*\*((?:(?!\*\*).)+)\*\*",
        r"`+([^`]+)`+",
        r"\$\$?([^$]+)\$\$?",
        r"\\\[((?:(?!\\\[).)+)\\\]",
        r"\\\(((?:(?!\\\().)+)\\\)",
        r"(?:\\approx|≈|=)\s*(.+)",
        r"\\displaystyle(?![A-Za-z])\s*(.+)",
        r"(.+?)(?:\s*(?<!\\)[;,:]|(?<!\.)\.)",
    )
)
_GROUPED = re.compile(r"([+-]?\d{1,3})((?:,\d{3})+)(?=(?:\.\d+)?\s*\\?%)")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    rf"(?<=\d)(?:\s+|\s*\\text\s*\{{\s*)({'|'.join(_SCALES)})(?![A-Za-z])(?:\s*\}}|([^{{}}]*))?(?:\}}|$)"
)
_SCIENTIFIC = re.compile(
    r"([+-]?)\s*(?:([\d.,]+)\s*(?:\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|\*|[xX])\s*)?10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|([+-]?\d{1,3}))"
)
_DEGREES = re.compile(r"(?<=\d)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})$")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{\s*(\d+)\s*\}")
_UNIT_AS_TEXT = re.compile(
    rf"\s*(?:(?:{_TEXT_COMMAND}\s*\{{(?P<words>[^{{}}\d]*)\}}|\\(?:cdot|per)(?![A-Za-z]))(?:\s*\^\s*\{{?-?\d\}}?)?[\s/.]*)+"
    r"(?=[,;)\]]|\\\}|$)"
)
_SHORT_UNITS = r"cm|mm|km|kg|mg|ml|mL|lb|oz|ft|yd|mi|hr|in|m/s|km/h|[AaPp]\.?[Mm]"
# The alternatives exclude each other: if two of them could match one word, a search would take
# exponential time.
_WORD = rf"(?:{_SHORT_UNITS}|[A-Za-z]{{3,}})(?![A-Za-z])"
_UNIT_AS_WORDS = re.compile(
    rf"(?<=[\d}})])(?:\s+(?P<words>(?:sq|cu|{_WORD})(?:[ /]+(?:a|an|of|{_WORD}))*)|(?P<short>cm|mm|km|kg|mph))"
    r"(?:\s*\^\s*\{?[23]\}?)?\.?\s*(?=[,;)\]]|\\\}|$)"
)
_LETTERS = re.compile(r"[A-Za-z]+")
_NO_UNITS = frozenset(
    # Words that join, condition or scale what stands before them, and names of functions and
    # variables.
    """
    or and if when for mod but not where with plus minus times over remainder otherwise each until
    unless hundred thousand million billion trillion dozen half sin cos tan cot sec csc log exp
    sqrt gcd lcm det inf infty alpha beta gamma delta theta lambda sigma phi psi omega rho tau
    """.split()  # noqa: SIM905
)
_TIME_OF_DAY = re.compile(r"(?<![A-Za-z])([ap])\.?\s?m\b\.?[\s}]*$", re.IGNORECASE)
_WITH_BASE = re.compile(r"([0-9A-Fa-f]+)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d))")
_CHOICE = re.compile(
    rf"(?:{_TEXT_COMMAND}\s*\{{\s*)?(?:\(([A-J])\)|([A-J])[).:])\s*(\}}?)\s*(.*)", re.DOTALL
)
_LONE_CHOICE = re.compile(r"[A-J]")
_CAPITALISED = re.compile(r"[A-Z][a-z]{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")


def spelled(text: str) -> str:
    r"""Return an answer in one spelling.

    >>> spelled(r"18\ \text{dollars}"), spelled("3 1/2 cups"), spelled("x^2+3t"), spelled(r"**90°**")
    ('18', '3\\frac{1}{2}', 'x^2+3t', '90^\\circ')
    """
    text = _unwrapped(text.translate(_CHARACTERS))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _SCALED.sub(_scale, text)
    text = _without_units(_unwrapped(_REPEATING.sub(_fraction, text)))
    if grouped := _GROUPED.match(text):
        text = grouped[1] + grouped[2].replace(",", "") + text[grouped.end() :]
    return _unwrapped(text)


def plain_number(text: str) -> str:
    r"""Return a number in scientific notation, or of degrees, without LaTeX; any other text unchanged.

    >>> plain_number(r"1.6\times 10^{-19}"), plain_number("10^5"), plain_number("x")
    ('1.6e-19', '1e5', 'x')
    """
    if text.endswith(("\\circ", "}")):
        text = _DEGREES.sub("", text)
    match = _SCIENTIFIC.fullmatch(text)
    if match is None:
        return text
    return f"{match[1]}{match[2] or 1}e{match[3] or match[4]}"


def time_of_day(text: str) -> str | None:
    """Return `a` or `p` for an answer that ends with AM or PM."""
    match = _TIME_OF_DAY.search(text)
    return match[1].lower() if match and re.search(r"\d", text) else None


def with_base(text: str) -> tuple[str, str] | None:
    r"""Return digits and base of a number such as `101_2` or `2516_{8}`; None for everything else."""
    match = _WITH_BASE.fullmatch(text)
    return (match[1].lstrip("0").lower(), match[2] or match[3]) if match else None


def choice(text: str) -> tuple[str, str] | None:
    r"""Return letter and content of a labelled choice: `(B)`, `B. 12`, `\textbf{(B)}\ 12`, or a letter alone.

    >>> choice(r"\textbf{(B)} 12"), choice("B"), choice("B + 1")
    (('B', '12'), ('B', ''), None)
    """
    if _LONE_CHOICE.fullmatch(text):
        return text, ""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    content = match[4]
    if text.startswith("\\") and not match[3]:
        content = content.removesuffix("}")
    return match[1] or match[2], content.strip()


def words_of(text: str) -> str | None:
    r"""Return the words of an answer that is nothing but words, in lower case: `\text{No solution}`."""
    if whole := _WHOLE_TEXT.fullmatch(text):
        text = whole[1]
    return " ".join(text.lower().split()) if _WORDS.fullmatch(text.strip()) else None


def is_text(text: str) -> bool:
    r"""Return True for one `\text{…}` or one capitalised word: its letters are not variables."""
    return (_WHOLE_TEXT.fullmatch(text) or _CAPITALISED.fullmatch(text)) is not None


def _unwrapped(text: str) -> str:
    """Remove what stands around an answer: emphasis, delimiters of mathematics, punctuation behind
    it.
    """
    text = text.strip()
    while True:
        before = text
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(text):
                text = match[1].strip()
        if (whole := _WHOLE_TEXT.fullmatch(text)) and re.search(r"\d", whole[1]):
            text = whole[1].strip()
        if text == before:
            return text


def _without_units(text: str) -> str:
    text = _UNIT_AS_TEXT.sub(_unless_joining, text)
    text = _UNIT_AS_WORDS.sub(_unless_joining, text)
    return text.strip()


def _unless_joining(unit: re.Match[str]) -> str:
    """Return nothing in place of a unit. Words that are not a unit, or that stand alone, stay."""
    words = {word.lower() for word in _LETTERS.findall(re.sub(_TEXT_COMMAND, "", unit[0]))}
    before = unit.string[: unit.start()].rstrip()
    if not before or before[-1] in ",;([{" or words & _NO_UNITS:
        return unit[0]
    return ""


def _scale(number: re.Match[str]) -> str:
    """Return a word such as million as a power of ten. A unit behind the word stays."""
    unit = (number[2] or "").strip()
    return rf"\times 10^{{{_SCALES[number[1]]}}}" + (rf"\text{{ {unit}}}" if unit else "")


def _fraction(number: re.Match[str]) -> str:
    """Return a repeating decimal, such as `0.1` and a 6 under a bar, as a fraction."""
    whole, once, again = number[1] or "0", number[2], number[3]
    nines = int("9" * len(again) + "0" * len(once))
    above = int(whole + once + again) - int(whole + once)
    return rf"\frac{{{above}}}{{{nines}}}"


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
    """Compare two answers, one of them a labelled choice; None if the contents must decide."""
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
        processes: comparisons at the same time; slow ones do not count.
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
