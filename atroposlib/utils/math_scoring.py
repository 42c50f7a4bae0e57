r"""Read the answer in `\boxed{…}`, and compare it with the expected one, by math_verify over
latex2sympy2_extended.

Plain numbers and equal texts are compared here. Everything else goes to math_verify, which guards
against endless simplification with SIGALRM. That only works in a process's main thread, and
environments run in an event loop, often with threads. The comparison therefore runs in a child
process: there the alarm works, and a child that hangs all the same is killed and replaced.

No answer makes a comparison raise: an answer that cannot be read or compared is not equal.

The middle of the file gives one spelling to answers that mean the same: units, currencies,
typographic characters. Every rule keeps the meaning. The result is LaTeX for math_verify. Its own
removal of units is not used: it takes the variable of `3m` or of `x^2+3t` for a unit.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

from atroposlib.errors import EnvironmentFailure
from atroposlib.utils.measures import TEXT_COMMAND, equal_measures, measure
from atroposlib.utils.processes import ChildDied, KillableCalls

# ---- the answer in `\boxed{…}` or `\fbox{…}` ----

# The rules, which docs/grading.md repeats:
#
# - Braces inside a box are balanced; escaped braces do not count.
# - `\boxed 5`, without braces, holds everything up to the next space or `$`, without punctuation
#   behind it.
# - A box inside a box counts as its content.
# - The last box that is not empty is the answer. Several boxes that only `,`, `;`, "and" or "or" separate are one list.
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
    r"""Return the answer of the last box that is not empty; None without an answer.

    >>> last_boxed(r"first \boxed{1}, then \boxed{7}"), last_boxed(r"\boxed{1} and \boxed{7}")
    ('7', '1, 7')
    >>> last_boxed(r"\boxed{1} no, \boxed{7")  # cut off
    """
    boxes = find_boxes(text)
    outermost = _outermost(boxes)
    while len(outermost) > 1 and boxes[outermost[-1]].end is not None:
        if _innermost_content(text, boxes, outermost[-1]):
            break
        outermost.pop()
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
    | dict.fromkeys("−–—‐‑﹣－", "-")
    | {
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
        "º": r"^\circ ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "⁄": "/",
        "⌊": r"\lfloor ",
        "⌋": r"\rfloor ",
        "¢": r"\text{ cents}",
        "％": r"\%",
        "’": "'",
        "′": "'",
        "″": "''",
        "⟨": "(",
        "⟩": ")",
        "≡": r"\equiv ",
        "≈": r"\approx ",
    }
    | {
        sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\u2044"))
        for sign in "½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    }
    | {
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "Ω": r"\Omega ",
        "μ": r"\mu ",
        "µ": r"\mu ",
    }
)
_RAISED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_WHOLE_TEXT = re.compile(rf"{TEXT_COMMAND}\s*\{{([^{{}}]*)\}}")
_SHORT_UNITS = r"cm|mm|km|kg|mg|ml|mL|lb|oz|ft|yd|mi|hr|in|m/s|km/h|[AaPp]\.?[Mm]"
_FUNCTIONS = r"(?:(?:arc)?(?:sin|cos|tan)|sinh|cosh|tanh|cot|sec|csc|cis|ln|log|exp)(?![A-Za-z])"
_CALLED = rf"{_FUNCTIONS}(?=\s*(?:[\\([{{|^_\d]|[A-Za-z](?![A-Za-z])|{_FUNCTIONS}))"
"""A function with an argument: the `sec` of `5 sec` is a unit."""
_INDEX = r"(?:\{\s*(\w+)\s*\}|(\w))"
_SMALL_POWER = r"(?:\^\s*(?:\d|\{\s*\d\s*\}))?"
_UNIT_ABOVE = r"([kcm]m|mi|ft|[km]?g|lb|oz|m[lL]|miles?|met(?:er|re)s?|feet|m(?=\s*\}\s*\{\s*s))"
_UNIT_BELOW = r"(h|hr|hours?|s|sec|seconds?|min|minutes?|days?|c?m|L|m[lL])"
"""Units of a fraction such as `\\frac{km}{h}`. Most fractions of two letters have variables."""
_IN_DEGREES = r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})"
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"{TEXT_COMMAND}\s*\{{\s*([\d.]+|,|)\s*\}}(?!\s*_)", r" \1 "),
        (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))", ""),
        (r"\\tag\*?\s*\{[^{}]*\}", ""),
        (r"\^\s*(?:\\prime(?![A-Za-z])|\{\s*\\prime\s*\})", "'"),
        (r"(?<=[\w)}])(\s*)\*\*\1(\([^()]*\)|-?[\w.]+)", r"^{\2}"),
        (r"\\var(phi|epsilon|theta|rho|sigma)(?![A-Za-z])", r"\\\1"),
        (r"\{p?smallmatrix\}", "{pmatrix}"),
        (r"\\frac\s*(\\pi(?![A-Za-z]))", r"\\frac{\1}"),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        (r"√\s*(?:(\d+|[A-Za-z])|\(([^()]*)\))", r"\\sqrt{\1\2}"),
        (r"∛\s*(?:(\d+|[A-Za-z])|\(([^()]*)\))", r"\\sqrt[3]{\1\2}"),
        (r"√\s*|(?<![A-Za-z\\])sqrt\s*(?=[{\d])", r"\\sqrt"),
        (r"\\sqrt\s*(\[[^\[\]]*\])\s*([A-Za-z0-9])", r"\\sqrt\1{\2}"),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", " "),
        (r"\\\\\[\s*-?[\d.]+\s*(?:pt|ex|em|mm|cm)\s*\]", r"\\\\"),
        (r"(?<!\\)\\[ ,:;]|~(?!=)|\\q?quad(?![A-Za-z])", " "),
        (r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
        (r"\\+$", ""),
        (r"\\(?:text)?color\s*\{\s*[A-Za-z]+\s*\}", ""),
        (
            r"\\(?:bf(?:series)?|rm|it|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])",
            "",
        ),
        (r"\\(?:mathrm|text)\s*\{\s*i\s*\}", "i"),
        (rf"{TEXT_COMMAND}\s*\{{\s*(and|or)\s*\}}", r"\\text{ \1 }"),
        (r"\\(?:s|nice)frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\[dt]?binom\s*(?:\{([^{}]*)\}|([A-Za-z\d]))\s*(?:\{([^{}]*)\}|([A-Za-z\d]))",
            r"(\\binom{\1\2}{\3\4})",
        ),
        (r"\\(?:left|right)\s*(?=[()\[\]])", ""),
        (r"(?i)^(?:\\text\s*\{)?\s*([+-]?)infinity\s*\}?$", r"\1\\infty"),
        (r"^\s*(?:\\text\s*\{\s*)?(\d+)\s*\}?_", r"\1_"),
        (r"^\(\s*([0-9A-F]+)\s*\)\s*_", r"\1_"),
        (
            r"(?<=\d)\s*(?:\\text\s*\{\s*)?\(?(?:in\s+)?base[\s}]+(\d+)\s*\)?\s*\}?$",
            r"_{\1}",
        ),
        (
            r"^([^<>=,]+?)\s*(?:>|\\gt(?![A-Za-z]))\s*([A-Za-z])\s*(?:>|\\gt(?![A-Za-z]))\s*([^<>=,]+)$",
            r"\3<\2<\1",
        ),
        (
            rf"(?<=[\d}}])\s*\(\s*(?:{TEXT_COMMAND}\s*\{{)?\s*(?:{_SHORT_UNITS})\s*\}}?\s*\)$",
            "",
        ),
        (
            r"(?<=\d)\s*/\s*(?:\\text\s*\{\s*)?(?:second|minute|hour|day|week|month|year|person)\s*\}?$",
            "",
        ),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (
            rf"(?:\\operatorname\s*\{{|{TEXT_COMMAND}\s*\{{(?=\s*cis))\s*({_FUNCTIONS})\s*\}}"
            rf"|(?<![A-Za-z\\])(?<!text\{{)(?<!thrm\{{)({_CALLED}|pi(?![A-Za-z]))",
            r"\\\1\2 ",
        ),
        (r"(?i)^(\\text\s*\{\s*)?(?:option|choice)\s+(?=\(?[A-J](?![A-Za-z]))", r"\1"),
        (
            r"(?<![\d.])(\d*)\.(\d{0,20}?)(?:(\d{1,6}?)\3{2,40}|(\d{3,6})\4)\s*(?:\.{3}|…|\\[lc]?dots(?![A-Za-z]))",
            r"\1.\2\\overline{\3\4}",
        ),
        (r"(?<=\d)\s*\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?", ""),
        (r"((?<!1)1(?=st)|(?<!1)2(?=nd)|(?<!1)3(?=rd)|\d(?=th))(?:st|nd|rd|th)(?![A-Za-z])", r"\1"),
        (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?)0*(\d+)(?![\w.])", r"\1\\times 10^{\2\3}"),
        (r"\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"(?i)^(?:\\text\s*\{)?\s*(?:the\s+)?empty\s+set\s*\}?$", r"\\emptyset"),
        (
            r"(?i)^(?:\\text\s*\{)?\s*all\s+real(?:s|\s+numbers)\s*\}?$",
            r"\\mathbb{R}",
        ),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (r"\\bmod(?![A-Za-z])", r"\\mod "),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"(\.\d{6,})\s*(?:\.{3}|…|\\[lc]?dots(?![A-Za-z]))", r"\1"),
        (r"\.{3}|…|\\[cv]?dots[bcimo]?(?![A-Za-z])", r"\\ldots "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (
            rf"(\\(?:sin|cos|tan|cot|sec|csc|cis)\s*{_SMALL_POWER})\s*(?:{_IN_DEGREES}|\(\s*{_IN_DEGREES}\s*\))",
            r"\1(\\frac{\2\3\\pi}{180})",
        ),
        (r"\\cis\s*(\((?:[^()]|\([^()]*\))*\)|[^()+,;\]]+)", r"e^{i\1}"),
        (
            rf"(?:\{{\s*\}}|(?<![\w)}}\]]))\s*[_^]\s*{_INDEX}\s*(?:\\(?:text|mathrm)\s*\{{\s*C\s*\}}|C)"
            rf"\s*_\s*{_INDEX}",
            r"(\\binom{\1\2}{\3\4})",
        ),
        (
            rf"(?:\{{\s*\}}|(?<![\w)}}\]]))\s*[_^]\s*{_INDEX}\s*(?:\\(?:text|mathrm)\s*\{{\s*P\s*\}}|P)"
            rf"\s*_\s*{_INDEX}",
            r"(\\frac{\1\2!}{(\1\2-{\3\4})!})",
        ),
        (
            rf"(?<=[\d}}])\s*\\[dt]?frac\s*\{{\s*{_UNIT_ABOVE}\s*\}}\s*\{{\s*{_UNIT_BELOW}\s*{_SMALL_POWER}\s*\}}",
            r"\\text{ \1/\2}",
        ),
        (r"(?:USD|EUR|GBP|Rs\.?)\s*(?=[\d.])|US\s*(?=\\?\$)", ""),
        (r"[€£¥₹]|\\?\$|\\(?:textdollar|texteuro|euro|pounds)(?![A-Za-z])", ""),
        (r"(?:\\text\s*\{\s*|\b)per\s?cent\s*\}?\s*$", r"\\%"),
        (
            r"(\^\s*\{?\s*\\circ\s*\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*[CFK]\s*\}|[CF])(?![A-Za-z])",
            r"\1",
        ),
        (r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    )
)
_NOT_DENIED = r"(?![^{}\d:]*(?i:\b(?:not|never)\b|n't\b))"
"""In front of a label: `Not: 5` does not give 5."""
_CHANGING = r"(?:not?|never|half|twice|thrice|double|triple|third|quarter|minus|negative|times)"
_NAME = (
    rf"(?!(?:[A-Za-z]+\s+)*{_CHANGING}\b)(?=[A-Za-z\s]*(?!abc)[A-Za-z][a-z]{{3}})"
    r"[A-Za-z](?:[A-Za-z\s]*[A-Za-z])?"
)
"""Words in front of `=`, one with four letters, as in `total area = 12`. Fewer letters are variables."""
_NAMED = re.compile(rf"[\s$]*(?:{TEXT_COMMAND}\s*\{{\s*)?({_NAME})\s*\}}?\s*=")
_WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\*\*((?:(?!\*\*).)+)\*\*",
        r"`+([^`]+)`+",
        r"\$\$?([^$]+)\$\$?",
        r"\\\[((?:(?!\\\[).)+)\\\]",
        r"\\\(((?:(?!\\\().)+)\\\)",
        r"(?:\\approx|\\therefore(?![A-Za-z])|\\(?:Rightarrow|implies)(?![A-Za-z])|=|(?:[A-Za-z]\s*)?\\equiv(?![A-Za-z]))\s*(.+)",
        r"\\displaystyle(?![A-Za-z])\s*(.+)",
        rf"{TEXT_COMMAND}\s*\{{{_NOT_DENIED}[^{{}}\d]*(?:[:=]|\bis)\s*\}}\s*(.+)",
        rf"{_NOT_DENIED}(?:[A-Za-z]{{2,}}\s+)*[A-Za-z]{{2,}}\s*:\s*([^:]+)",
        rf"(?i:(?:{TEXT_COMMAND}\s*\{{\s*)?(?:the\s+)?point\s*\}}?)\s*([A-Z]?\s*\(.+\))",
        rf"(?!.*(?:[,;]|\b(?:and|or)\b).*=)(?=[^=]*=.*[\d\\])(?:{TEXT_COMMAND}\s*\{{\s*)?{_NAME}\s*\}}?\s*=\s*(.+)",
        r"(?i:approximately|approx\.|about|roughly|exactly)\s+(.+)",
        rf"{TEXT_COMMAND}\s*\{{\s*(?i:approximately|approx\.|about|roughly|exactly)\s*\}}\s*(.+)",
        r"(?i:the\s+(?:correct\s+|final\s+)?answer\s+is)\s+(.+)",
        r"\(\s*(?:x\s*,\s*y(?:\s*,\s*z)?|a\s*,\s*b(?:\s*,\s*c)?|m\s*,\s*n|p\s*,\s*q)\s*\)\s*=\s*(\(.+\))",
        rf"(.*?\S)(?i:\s*{TEXT_COMMAND}\s*\{{\s*|\s+)(?i:is\s+the\s+(?:correct\s+|final\s+)?answer)\s*\}}?",
        r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\||\\mid(?![A-Za-z])|:)((?:(?!\\\}).)*)\\\}",
        r"(.+?)(?:\s*(?<!\\)[;,:]|(?<!\.)\.)",
    )
)
_BRACKETED = re.compile(
    r"([\[\]])((?:(?!\\c[au]p)[^\[\]()])*\w\s*[,;](?:(?!\\c[au]p)[^\[\]()])+)([\[\]])"
)
_WITH_SEMICOLONS = re.compile(
    r"([\[\](]|\\\{)((?:(?!\\c[au]p|\\[{}])[^\[\]();])*(?:;(?:(?!\\c[au]p|\\[{}])[^\[\]();])*)+)([\[\])]|\\\})"
)
_GROUPED = re.compile(r"([+-]?\d{1,3})((?:,\d{3})+)(?=(?:\.\d+)?\s*\\?%)")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    rf"(?<=\d)(?:\s+|\s*\\text\s*\{{\s*)({'|'.join(_SCALES)}|dozens?)(?![A-Za-z])(?:\s*\}}|([^{{}}]*))?(?:\}}|$)"
)
_SCIENTIFIC = re.compile(
    r"([+-]?)\s*(?:([\d.,]+)\s*(?:\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|\*|[xX])\s*)?10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|([+-]?\d{1,3}))"
)
_BOTH_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_DEGREES = re.compile(r"(?<=\d)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})$")
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}]*)\}|(\d?\.\d+))")
_SHORT_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d{1,4})(?![\d.])")
_REPEATING_DOTS = re.compile(r"(\.\d*)(?:\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?|\((\d+)\))")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
_UNIT_IN_TEXT = rf"{TEXT_COMMAND}\s*\{{(?:[^{{}}\d]|\^\s*(?:\{{-?\d\}}|-?\d))*\}}"
_UNIT_AS_TEXT = re.compile(
    rf"\s*(?:(?:{_UNIT_IN_TEXT}|\\[dt]?frac\s*\{{{_UNIT_IN_TEXT}{_POWER}\}}\s*\{{{_UNIT_IN_TEXT}{_POWER}\}}"
    rf"|\\(?:cdot|per|mu|Omega)(?![A-Za-z])){_POWER}[\s/.]*)+"
    r"(?=[,;)\]]|\\\}|$)"
)
# The alternatives exclude each other: if two of them could match one word, a search would take
# exponential time.
_WORD = rf"(?:{_SHORT_UNITS}|[A-Za-z]{{3,}})(?![A-Za-z])"
_UNIT_AS_WORDS = re.compile(
    rf"(?:(?<=[\d}})])|(?<=\\pi))(?:\s+(?P<words>(?:sq|cu|{_WORD})(?:[ /]+(?:a|an|of|{_WORD}))*)|(?P<short>cm|mm|km|kg|mph))"
    r"(?:\s*\^\s*\{?[23]\}?)?\.?\s*(?=[,;)\]]|\\\}|$)"
)
_UNIT_AS_SYMBOL = re.compile(
    r"([+-]?\d[\d.,]*|[+-]?\.\d+)\s+[kcmMGT]?(?:Hz|Pa|eV|[JWVANBmgLKsh])(?:\s*\^\s*\{?-?[1-4]\}?)?"
)
"""A number with a space and one letter, as in `5 m`. Beside a plain number the letter is a unit."""
_LETTERS = re.compile(r"[A-Za-z]+")
_NOT_A_WORD = re.compile(rf"{TEXT_COMMAND}|\\(?:mu|Omega)(?![A-Za-z])")
_NO_UNITS = frozenset(
    # Words that join, condition, scale or judge what stands before them, and names of functions and
    # variables.
    """
    or and if when for mod but not where with plus minus times over remainder otherwise each until
    unless hundred thousand million billion trillion dozen half halves thirds fourths fifths sixths
    sevenths eighths ninths tenths twelfths hundredths thousandths squared cubed factorial zero sin cos tan cot csc log exp
    is isn are aren was wasn were be not cannot could should would maybe perhaps possibly probably too
    sqrt gcd lcm det inf infty alpha beta gamma delta theta lambda sigma phi psi omega rho tau
    """.split()  # noqa: SIM905
)
_NO_LAST_WORDS = frozenset(
    """
    wrong false incorrect invalid impossible fails no above below third fourth fifth sixth seventh
    eighth ninth tenth hundredth thousandth
    """.split()  # noqa: SIM905
)
"""Words that end no unit. In front of a noun they belong to one: `5 wrong turns`."""
_TIME_OF_DAY = re.compile(r"(?<![A-Za-z])([ap])\.?\s?m\b\.?[\s}]*$", re.IGNORECASE)
_AROUND_NUMBER = re.compile(rf"{TEXT_COMMAND}|\\[!,;: ]|[\s{{}}~*]")
_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d))?(?:([ap])\.?m)?\.?", re.IGNORECASE)
_ISO_DATE = re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)")
_MONTHS = ["january", "february", "march", "april", "may", "june", "july"]
_MONTHS += ["august", "september", "october", "november", "december"]
_MONTH = (
    rf"(?P<month>{'|'.join(f'{name[:3]}(?:{name[3:]})?' for name in _MONTHS)}|sept)(?![a-z])\.?"
)
_DATES = (
    _ISO_DATE,
    *(
        re.compile(rf"{day_and_month}(?:,?\s*(?P<year>\d{{4}}))?", re.IGNORECASE)
        for day_and_month in (
            rf"{_MONTH}\s*(?P<day>\d\d?)(?:st|nd|rd|th)?",
            rf"(?P<day>\d\d?)(?:st|nd|rd|th)?\s*(?:of\s+)?{_MONTH}",
        )
    ),
)
_RATIO_SIGN = re.compile(rf"(?::|\bto\b|{TEXT_COMMAND}\s*\{{\s*to\s*\}})")
_RATIO_PART = re.compile(r"\d{1,20}(?:\.\d{1,20})?")
_RESIDUE = re.compile(
    r"(?P<number>[+-]?\d{1,300})\s*(?P<class>\(\s*\\?|\\p)?\\?b?mod(?:ulo)?(?![A-Za-z])\s*\{?\s*(?P<modulus>\d{1,300})\s*\}?\s*\)?"
)
_PERCENT = re.compile(r"(.*[^\s\\%])\s*\\?%")
_QUANTITY = r"([+-]?\d+(?:\.\d+)?)\s+([A-Za-z]{2,}(?:\s+[A-Za-z]+)*)"
_QUANTITIES = re.compile(rf"(?:\s*{_QUANTITY}){{2,}}\s*")
_BETWEEN_QUANTITIES = re.compile(rf"{TEXT_COMMAND}|[{{}}~,;]|\\[ ,;]|\band\b")
_WITH_BASE = re.compile(
    rf"([0-9A-Fa-f]+)\s*_\s*(?:(\d)|\{{\s*(?:{TEXT_COMMAND}\s*\{{)?\s*\(?\s*(\w+)\s*\)?\s*\}}?\s*\}})"
)
_BASES = "zero one two three four five six seven eight nine ten".split()  # noqa: SIM905
_CHOICE = re.compile(
    rf"(?:{TEXT_COMMAND}\s*\{{\s*)?(?:\(([A-J])\)|([A-J])[).:])\s*(\}}?)\s*"
    r"(?![,;&]|(?:\\text\s*\{\s*)?(?:and|or)\b)((?:(?!\([A-J]\)).)*)",
    re.DOTALL,
)
_LONE_CHOICE = re.compile(r"[A-J]")
_CAPITALISED = re.compile(r"[A-Z][a-z]{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_SAME_WORDS = {"dne": "does not exist"}
_UP_TO_NINETEEN = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen
    """.split()  # noqa: SIM905
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
_NUMBER_WORDS = {word: number for number, word in enumerate(_UP_TO_NINETEEN)} | {
    f"{word} {unit}".removesuffix(" zero"): 10 * ten + number
    for ten, word in enumerate(_TENS, 2)
    for number, unit in enumerate(_UP_TO_NINETEEN[:10])
}
_PARTS = "half third fourth fifth sixth seventh eighth ninth tenth".split()  # noqa: SIM905
_DENOMINATORS = {word: number for number, word in enumerate(_PARTS, 2)} | {
    "quarter": 4,
    "hundredth": 100,
    "thousandth": 1000,
}
_AROUND_NAME = re.compile(rf"{TEXT_COMMAND}|[{{}}$]")
_OPERATOR = re.compile(r"\\(?:[dt]?frac|cdot|times|sqrt)(?![A-Za-z])|[\d+*/^|-]")
_LONG_WORD = re.compile(r"[A-Za-z]{4,}")
_DECIMAL_COMMA = re.compile(r"(\s*[+-]?\d+),(\d{1,2}|\d{4,})\s*")
_COUNT = r"(?:\{\s*\d{1,6}\s*\}|\d{1,6})"
_COMBINATIONS = re.compile(
    rf"(?:(?<![\w.^\\])\d{{1,6}}\s*[CP]\s*_?\s*{_COUNT}|C\s*\(\s*\d{{1,6}}\s*,\s*\d{{1,6}}\s*\)"
    rf"|[CP]\s*_\s*{_COUNT}\s*\^\s*{_COUNT}|[CP]\s*\^\s*{_COUNT}\s*_\s*{_COUNT})(?!\s*[\w.^(])"
)


def spelled(text: str) -> str:
    r"""Return an answer in one spelling.

    >>> spelled(r"18\ \text{dollars}"), spelled("3 1/2 cups"), spelled("x^2+3t"), spelled(r"**90°**")
    ('18', '3\\frac{1}{2}', 'x^2+3t', '90^\\circ')
    """
    text = _in_plain_characters(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _SCALED.sub(_scale, text)
    text = _EXPONENT.sub(_exact, text)
    text = _REPEATING_DOTS.sub(r"\1\\overline{\2\3\4\5}", text)
    text = _WITH_SEMICOLONS.sub(_with_commas, text)
    text = _BRACKETED.sub(
        lambda found: f"{found[1].replace(']', '(')}{found[2]}{found[3].replace('[', ')')}", text
    )
    text = _without_units(_unwrapped(_REPEATING.sub(_fraction, text)))
    if grouped := _GROUPED.match(text):
        text = grouped[1] + grouped[2].replace(",", "") + text[grouped.end() :]
    text = _with_combinations(_unwrapped(text))
    number = _number_in_words(text)
    return text if number is None else str(number)


def _in_plain_characters(text: str) -> str:
    """Return an answer without what stands around it, and with LaTeX for typographic characters."""
    text = _RAISED.sub(lambda power: f"^{{{_as_digits(power)}}}", text)
    text = _LOWERED.sub(lambda index: f"_{{{_as_digits(index)}}}", text)
    return _unwrapped(text.translate(_CHARACTERS))


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


def residue(text: str) -> tuple[int, int] | None:
    r"""Return the least residue and the modulus of `3 \pmod 7`; None for everything else.

    Only the operation reduces: `10 \bmod 7` is 3, but `10 \pmod 7` must be written as 3.

    >>> residue(r"3 \pmod{7}"), residue("10 mod 7"), residue("10 (mod 7)")
    ((3, 7), (3, 7), None)
    """
    match = _RESIDUE.fullmatch(re.sub(rf"{TEXT_COMMAND}\s*\{{([^{{}}]*)\}}", r" \1 ", text))
    if match is None or not int(match["modulus"]):
        return None
    number, modulus = int(match["number"]), int(match["modulus"])
    if match["class"] and number != number % modulus:
        return None
    return number % modulus, modulus


def percentage(text: str) -> str | None:
    r"""Return the number in front of a percent sign at the end; None if there is none.

    >>> percentage(r"12.5\%"), percentage("12.5")
    ('12.5', None)
    """
    match = _PERCENT.fullmatch(text)
    return match[1] if match else None


def quantities(text: str) -> dict[str, Decimal] | None:
    r"""Return unit -> number of several numbers with different units; None for everything else.

    >>> quantities("2 hours and 30 minutes"), quantities("3 cm, 4 cm")
    ({'hours': Decimal('2'), 'minutes': Decimal('30')}, None)
    """
    flat = _BETWEEN_QUANTITIES.sub(" ", text)
    if not _QUANTITIES.fullmatch(flat):
        return None
    found = re.findall(_QUANTITY, flat)
    amounts = {" ".join(unit.lower().split()): Decimal(number) for number, unit in found}
    return amounts if len(amounts) == len(found) else None


def date(text: str) -> tuple[int | None, int, int] | None:
    """Return year, month and day of an answer that is nothing but a date; None for every other.

    >>> date("March 5th, 2020"), date("5 March"), date("2020-03-05")
    ((2020, 3, 5), (None, 3, 5), (2020, 3, 5))
    """
    flat = re.sub(rf"{TEXT_COMMAND}|\\[!,;: ]|[\s{{}}~*]+", " ", text).strip(" .$")
    for match in (pattern.fullmatch(flat) for pattern in _DATES):
        if match:
            month = match["month"]
            number = (
                int(month)
                if month.isdigit()
                else 1 + [name[:3] for name in _MONTHS].index(month[:3].lower())
            )
            return int(match["year"]) if match["year"] else None, number, int(match["day"])
    return None


def clock(text: str) -> tuple[int, int, str] | None:
    """Return hour, minute and `a`, `p` or nothing of a time such as `10:05`, `4 pm` or `noon`.

    The ratio `10:5` has no time.
    """
    flat = _AROUND_NUMBER.sub("", text).strip("$").removesuffix(".").lower()
    if flat in ("noon", "midnight"):
        return 12, 0, "p" if flat == "noon" else "a"
    match = _CLOCK.fullmatch(re.sub("^(\\d\\d?)o'clock", r"\1:00", flat))
    if match is None or not (match[2] or match[3]):
        return None
    return int(match[1]), int(match[2] or 0), (match[3] or "").lower()


def _same_time(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    """Compare two times: `4:00 pm` is 16:00. `4:00` may also be short for `4:00 pm`."""
    if bool(one[2]) == bool(other[2]):
        return one == other
    named, short = (one, other) if one[2] else (other, one)
    hours = named[0], named[0] % 12 + 12 * (named[2] == "p")
    return short[0] in hours and short[1] == named[1]


def ratio(text: str) -> list[Fraction] | None:
    """Return the shares of a ratio such as `3:2:1`, which add up to 1; None for everything else."""
    found = [_RATIO_PART.fullmatch(part.strip()) for part in _RATIO_SIGN.split(text)]
    parts = [Fraction(part[0]) for part in found if part]
    if len(found) < 2 or len(parts) < len(found) or not any(parts):
        return None
    whole = sum(parts)
    return [part / whole for part in parts]


def with_base(text: str) -> tuple[str, str] | None:
    r"""Return digits and base of a number such as `101_2` or `2516_{8}`; None for everything else."""
    match = _WITH_BASE.fullmatch(re.sub(rf"{TEXT_COMMAND}\s*\{{\s*([0-9A-F]+)\s*\}}", r"\1", text))
    if match is None:
        return None
    base = match[2] or match[3]
    return match[1].lstrip("0").lower(), str(_BASES.index(base)) if base in _BASES else base


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
    r"""Return the words of an answer that is nothing but words, in lower case.

    The order of words that "and" joins, and an article in front, do not count.

    >>> words_of(r"\text{No solutions}"), words_of("red and blue"), words_of("the circle")
    ('no solution', 'blue and red', 'circle')
    """
    if whole := _WHOLE_TEXT.fullmatch(text):
        text = whole[1]
    text = " ".join(text.lower().split())
    if not _WORDS.fullmatch(text):
        return None
    text = re.sub(r"^(?:the|an?) (?=[a-z]{2})", "", text)
    if text.startswith("no "):
        text = text.removesuffix("s")
    names = sorted(re.split(r"\s+and\s+", text))
    return _SAME_WORDS.get(text, " and ".join(names))


def _number_in_words(text: str) -> Fraction | None:
    r"""Return the number that words give, such as `\text{one hundred five}`; None for other text.

    >>> _number_in_words("two and a half"), _number_in_words("Three-fourths"), _number_in_words("a")
    (Fraction(5, 2), Fraction(3, 4), None)
    """
    flat = re.sub(rf"{TEXT_COMMAND}\s*\{{([^{{}}]*)\}}", r" \1 ", text)
    words = " ".join(flat.lower().replace("-", " ").split())
    if not re.search("[a-z]{3}", words):
        return None
    number, joined, rest = words.rpartition(" and ")
    part = _part_in_words(rest)
    if part is not None and not joined:
        return part
    count = _whole_in_words(number if part is not None and part < 1 else words)
    return None if count is None else count + (part or 0 if joined else 0)


def _part_in_words(words: str) -> Fraction | None:
    """Return the fraction that `three fourths` or `a half` gives; None for other words."""
    count, _, name = words.rpartition(" ")
    above = Fraction(1) if count in ("", "a", "one") else _whole_in_words(count)
    singular = name.replace("halves", "halfs").removesuffix("" if above == 1 else "s")
    below = _DENOMINATORS.get(singular)
    if above is None or below is None or (above != 1 and singular == name):
        return None
    return above / below if count or name == "half" else None


def _whole_in_words(words: str) -> Fraction | None:
    """Return the whole number that words or digits give; None for other words."""
    for scale, power in reversed(_SCALES.items()):
        before, found, behind = words.partition(f" {scale}")
        if found:
            count = _whole_in_words(before)
            rest = _whole_in_words(behind.strip().removeprefix("and ") or "zero")
            if not count or rest is None or rest >= 10**power:
                return None
            return count * 10**power + rest
    number = int(words) if words.isascii() and words.isdigit() else _NUMBER_WORDS.get(words)
    return None if number is None else Fraction(number)


def _are_texts(one: str, other: str) -> bool:
    r"""Return whether the letters of two answers of words are not variables.

    That is so if one is a `\text{…}` or a capitalised word, or if both have a word of four letters.
    """
    if any(_WHOLE_TEXT.fullmatch(text) or _CAPITALISED.fullmatch(text) for text in (one, other)):
        return True
    return all(_LONG_WORD.search(text) for text in (one, other))


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
        if (whole := _WHOLE_TEXT.fullmatch(text)) and re.search(r"\d|^\s*[A-J]\s*,", whole[1]):
            text = whole[1].strip()
        if text == before:
            return text


def _without_units(text: str) -> str:
    text = _UNIT_AS_TEXT.sub(_unless_joining, text)
    text = _UNIT_AS_WORDS.sub(_unless_joining, text)
    return text.strip()


def _as_digits(match: re.Match[str]) -> str:
    """Return raised or lowered digits and signs as ordinary ones."""
    return unicodedata.normalize("NFKC", match[0]).replace("−", "-")


def _unless_joining(unit: re.Match[str]) -> str:
    """Return nothing in place of a unit. Words that are not a unit, or that stand alone, stay."""
    words = [word.lower() for word in _LETTERS.findall(_NOT_A_WORD.sub("", unit[0]))]
    before = unit.string[: unit.start()].rstrip()
    if not before or before[-1] in ",;([{" or not _NO_UNITS.isdisjoint(words):
        return unit[0]
    if words and (words[-1] in _NO_LAST_WORDS or "n't" in unit[0].lower()):
        return unit[0]
    return ""


def _with_commas(bracket: re.Match[str]) -> str:
    """Return `(1,5;2)` as `(1.5,2)`: between semicolons, a comma is a decimal one."""
    entries = bracket[2].split(";")
    for index, entry in enumerate(entries):
        if "," in entry:
            number = _DECIMAL_COMMA.fullmatch(entry)
            if number is None:
                return bracket[0]
            entries[index] = f"{number[1]}.{number[2]}"
    return f"{bracket[1]}{','.join(entries)}{bracket[3]}"


def _with_combinations(text: str) -> str:
    r"""Return `5C2`, `C_5^2` or `C(5,2)` as a binomial, and `5P2` or `P_5^2` as factorials.

    If other letters are left, C and P are variables. `P(5,2)` is a point.

    >>> _with_combinations("5C2"), _with_combinations("5P2"), _with_combinations("C_5^2 x")
    ('(\\binom{5}{2})', '(\\frac{5!}{3!})', 'C_5^2 x')
    """
    flat = re.sub(rf"{TEXT_COMMAND}\s*\{{\s*([CP])\s*\}}", r"\1", text)
    read = _COMBINATIONS.sub(_selections, flat)
    return text if re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", read)) else read


def _selections(found: re.Match[str]) -> str:
    """Return the number of combinations or permutations as a formula."""
    above, below = map(int, re.findall(r"\d+", found[0]))
    if re.match(r"[CP]\s*\^", found[0]):
        above, below = below, above
    if above < below:
        return found[0]
    if "P" in found[0]:
        return rf"(\frac{{{above}!}}{{{above - below}!}})"
    return rf"(\binom{{{above}}}{{{below}}})"


def _scale(number: re.Match[str]) -> str:
    """Return a word such as million as a factor. A unit behind the word stays."""
    unit = (number[2] or "").strip()
    power = _SCALES.get(number[1])
    if power is None and measure(f"1 {unit}"):
        return number[0]
    factor = r"\cdot 12" if power is None else rf"\times 10^{{{power}}}"
    return factor + (rf"\text{{ {unit}}}" if unit else "")


def _exact(exponent: re.Match[str]) -> str:
    """Return an exponent with fractions for its decimals, with which SymPy computes exactly."""
    inside = _SHORT_DECIMAL.sub(
        lambda found: rf"\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}",
        exponent[1] or exponent[2] or "",
    )
    return f"^{{{inside}}}"


def _fraction(number: re.Match[str]) -> str:
    """Return a repeating decimal, such as `0.1` and a 6 under a bar, as a fraction."""
    whole, once, again = number[1] or "0", number[2], number[3] or number[4]
    nines = int("9" * len(again) + "0" * len(once))
    above = int(whole + once + again) - int(whole + once)
    return rf"\frac{{{above}}}{{{nines}}}"


logger = logging.getLogger(__name__)

PARSE_SECONDS = 5
KILL_AFTER_SECONDS = 30.0
PROCESSES = 2
MAX_NUMBER_CHARACTERS = 1000
MAX_APPROXIMATIONS = 3
MAX_EXPRESSION_CHARACTERS = 2000
"""A longer answer equals nothing but the same text: parsing it would take minutes."""

SMALL = 1e-3
"""Numbers below this must agree to this part of themselves, and not only to six decimal places."""

_CURRENCY = r"(?:\\?\$\s*|[€£¥₹]\s*)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*{_CURRENCY}*(?P<inner>[+-]?)"
    r"(?P<digits>[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}|\.[0-9]+"
    r"|(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+|(?:'[0-9]{3})+)|[0-9]+)(?:\.[0-9]*)?)"
    r"(?P<exponent>[eE][+-]?[0-9]{1,3})?"
    rf"\s*{_CURRENCY}*\.?"
)
_SPELLINGS = str.maketrans(
    "０１２３４５６７８９，．－＋−–‐‑\u00a0\u2009\u202f’", "0123456789,.-+----   '"
)
_LATEX_COMMA = re.compile(r",\\!|\{,\}|\\,")
_SPACE_IN_LIST = re.compile(r"\s*(,|&|\\\\)\s*")


def as_number(text: str) -> Decimal | None:
    r"""Return a plain number as people write it (`$1,234.50`, `-3`, `1e5`), or None for everything else.

    A comma, a space or an apostrophe separates thousands only in its places: `1,234` and `1 234` are
    numbers, `1,2` is two. Two points or more do so too, as in `1.234.567`.
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
    digits = re.sub("[, ']", "", match["digits"])
    if digits.count(".") > 1:  # 1.234.567
        digits = digits.replace(".", "")
    return Decimal(f"{sign}{digits}{match['exponent'] or ''}")


def _currency(text: str) -> str | None:
    """Return the sign of the currency of a plain number; None without one.

    Two dollar signs are the delimiters of mathematics.
    """
    signs = re.findall("[$€£¥₹]", text)
    return signs[0] if len(signs) == 1 else None


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

    These are plain numbers, with or without a unit, numbers with a base, and words. Times of the
    day, letters of choices, equal texts, and texts that are too long belong to them too.

    >>> compare_plainly("1,000", "1000.0"), compare_plainly("3, 5", "3,5"), compare_plainly("2", "4/2")
    (True, True, None)
    """
    numbers = as_number(gold), as_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        currencies = _currency(gold), _currency(answer)
        return numbers[0] == numbers[1] and (None in currencies or currencies[0] == currencies[1])
    texts = [_SPACE_IN_LIST.sub(r"\1", text.strip()) for text in (gold, answer)]
    if texts[0] == texts[1]:
        return bool(texts[0])
    if not all(texts) or max(len(gold), len(answer)) > MAX_EXPRESSION_CHARACTERS:
        return False
    return _compare_spelled(gold, answer)


def _compare_spelled(gold: str, answer: str) -> bool | None:
    """Compare the spellings of two answers; None if math_verify must decide."""
    if _names_another(gold, answer):
        return False
    dates = date(gold), date(answer)
    if dates[0] and dates[1]:
        return dates[0][1:] == dates[1][1:] and dates[0][0] in (None, dates[1][0])
    if any(_APPROXIMATELY.search(_in_plain_characters(text)) for text in (gold, answer)):
        return None
    amounts = _compare_amounts(gold, answer)
    if amounts is not None:
        return amounts
    gold, answer = _with_fourths(gold, answer), _with_fourths(answer, gold)
    one, other = spelled(gold), spelled(answer)
    one, other = _without_modulus(one, other), _without_modulus(other, one)
    if one and _SPACE_IN_LIST.sub(r"\1", one) == _SPACE_IN_LIST.sub(r"\1", other):
        return True
    if _ISO_DATE.fullmatch(one) or _ISO_DATE.fullmatch(other):
        return False
    for reading in (_as_spelled_number, clock, ratio, with_base, residue):
        values = reading(one), reading(other)
        if None not in values:
            return values[0] == values[1]
    percentages = _compare_percentages(one, other)
    if percentages is not None:
        return percentages
    words = words_of(one), words_of(other)
    if None not in words and (words[0] == words[1] or _are_texts(one, other)):
        return words[0] == words[1]
    return _compare_choices(one, other)


def _names_another(gold: str, answer: str) -> bool:
    """Return whether an answer names another quantity, as `perimeter = 12` and `2 area = 12` do.

    The gold answer may be `area = 12`, or 12 without a name.
    """
    names = [_NAMED.match(text) for text in (gold, answer)]
    if names[0] and names[1]:
        return names[0][1].lower().split() != names[1][1].lower().split()
    left, sign, _ = answer.partition("=")
    if not sign or names[1] or "".join(left.split()) == "".join(gold.partition("=")[0].split()):
        return False
    flat = _OPERATOR.sub("/", _AROUND_NAME.sub(" ", left.rpartition(":")[2]))
    words = re.findall("[A-Za-z]+", flat)
    if len(words) != 1:
        is_changed = any(re.fullmatch(_CHANGING, word.lower()) for word in words)
        return is_changed and "/" not in flat and any(map(_LONG_WORD.search, words))
    is_word = re.fullmatch("(?!abc)[A-Za-z][a-z]{3,}", words[0])
    return "\\" not in flat and "/" in flat and is_word is not None


def _with_fourths(text: str, other: str) -> str:
    """Return quarters as fourths. Beside a whole number they are coins, unless they are of a whole."""
    if "quarter" not in text:
        return text
    number = number_in(other)
    if number is not None and number == number.to_integral_value():
        return _QUARTERS_OF.sub("fourth", text)
    return _QUARTERS.sub("fourth", text)


def _without_modulus(text: str, other: str) -> str:
    """Return a residue as a number if the other answer names no modulus."""
    read = residue(text)
    return text if read is None or "mod" in other else str(read[0])


def _compare_amounts(gold: str, answer: str) -> bool | None:
    """Compare times and numbers by their units; None if the units do not decide."""
    halves = time_of_day(gold), time_of_day(answer)
    if None not in halves and halves[0] != halves[1]:
        return False
    amounts = quantities(gold), quantities(answer)
    if amounts[0] and amounts[1] and amounts[0].keys() == amounts[1].keys():
        return amounts[0] == amounts[1]
    texts = [_SCALED.sub(_scale, _in_plain_characters(text)) for text in (gold, answer)]
    measures = [measure(text) for text in texts]
    if measures[0] and measures[1]:
        equal = equal_measures(measures[0], measures[1])
        if equal is not None:
            return equal
    times = clock(gold), clock(answer)
    return _same_time(times[0], times[1]) if times[0] and times[1] else None


def _as_spelled_number(text: str) -> Decimal | None:
    symbol = _UNIT_AS_SYMBOL.fullmatch(text)
    return as_number(plain_number(symbol[1] if symbol else text))


def _compare_percentages(one: str, other: str) -> bool | None:
    """Compare plain numbers, at least one a percentage: 5 % is 5 and also 0.05."""
    percentages = percentage(one), percentage(other)
    if percentages == (None, None):
        return None
    first, second = as_number(percentages[0] or one), as_number(percentages[1] or other)
    if first is None or second is None:
        return None
    if first == second or None not in percentages:
        return first == second
    percent, share = (first, second) if percentages[0] else (second, first)
    return Fraction(percent) == 100 * Fraction(share)


def _compare_choices(one: str, other: str) -> bool | None:
    """Compare two answers, one of them a labelled choice; None if the contents must decide."""
    several = _several_choices(one), _several_choices(other)
    if several[0] and several[1]:
        # Without separators, three letters may be an order, such as BAC.
        is_order = several == (one, other) and len(one) > 2
        return one == other if is_order else sorted(several[0]) == sorted(several[1])
    choices = choice(one), choice(other)
    if choices[0] is not None and choices[1] is not None:
        if choices[0][0] != choices[1][0]:
            return False
        if not (choices[0][1] and choices[1][1]):
            return True
    return None


def _several_choices(text: str) -> str | None:
    """Return the letters of `AC` or `A, C`; None for everything else."""
    letters = re.sub(rf"{_BETWEEN_VALUES.pattern}|[\s()]", "", text)
    return letters if re.fullmatch("[A-J]{2,}", letters) else None


def _content(text: str) -> str:
    """Return an answer in one spelling, without the label of a choice."""
    text = spelled(text)
    labelled = choice(text)
    if labelled is not None and labelled[1]:
        text = spelled(labelled[1])
    return _with_both_signs(text)


def _with_both_signs(text: str) -> str:
    r"""Return a formula with `\pm` inside a fraction or root as a list of two."""
    sign = _BOTH_SIGNS.search(text)
    if sign is None or len(_BOTH_SIGNS.findall(text)) > 1 or "," in text or r"\{" in text:
        return text
    before, behind = text[: sign.start()], text[sign.end() :]
    if before.count("{") == before.count("}"):
        return text
    return f"{before}+{behind}, {before}-{behind}"


_VECTOR = re.compile(
    r"(?:(?:\\[a-z]+\s*)?\{?\s*[A-Za-z]\s*\}?\s*=\s*)?[(\[]?\s*\\begin\{([bp]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}\s*[)\]]?",
    re.DOTALL,
)
_QUARTERS = re.compile(r"(?<=[\d\s{])quarter(?=s?\b)")
_QUARTERS_OF = re.compile(rf"{_QUARTERS.pattern}(?=s?[\s}}]+of\b)")
_APPROXIMATELY = re.compile(r"\\approx(?:eq)?(?![A-Za-z])")
_ELLIPSIS = re.compile(r"\\ldots(?![A-Za-z])")
_OF_BASE = re.compile(
    r"(?<![A-Za-z\\\d])\d[\dA-F]*\s*_\s*(?!\{?\s*(?:\\text\s*\{\s*)?\(?\s*(?:10|ten)(?![A-Za-z\d]))"
)
_PRODUCT_OF_VARIABLES = re.compile(r"\s*[a-z]\s*[a-z]\s*=")
_TUPLE = re.compile(r"\(.*,.*\)", re.DOTALL)
_ONE_TUPLE = re.compile(r"\((?:(?!\\[{}])[^()\[\]])*,(?:(?!\\[{}])[^()\[\]])*\)")
_POINT = re.compile(rf"([A-MO-TV-Z])\s*=?\s*({_ONE_TUPLE.pattern})")
"""A point with its name. N(0,1) and U(0,1) are distributions."""
_PRIME = re.compile(r"(?<=[\w)}'])'(?!\d{3}(?!\d))|\"|\\prime(?![A-Za-z])")
_SET = re.compile(r"\\\{[^()]*,[^()]*\\\}")
_LIST = re.compile(r"(?!.*\\(?:\{|begin|pm|mp))[^()\[\]|<>=]*,[^()\[\]|<>=]*")
_BETWEEN_VALUES = re.compile(rf"(?:[,;]|\band\b|{TEXT_COMMAND}\s*\{{\s*and\s*\}})")
_OR = re.compile(rf"{TEXT_COMMAND}\s*\{{\s*or\s*\}}|\bor\b")
_ASSIGNMENT = re.compile(r"([A-Za-z])\s*=\s*([^=]+)")


def _with_tuples(one: str, other: str) -> tuple[str, str]:
    """Return two answers in which assignments, a vector or a list are a tuple if only one has them."""
    values = assignments(one), assignments(other)
    if bool(values[0]) != bool(values[1]):
        one, other = values[0] or one, values[1] or other
    points = _POINT.fullmatch(one), _POINT.fullmatch(other)
    if points[0] and (_ONE_TUPLE.fullmatch(other) or (points[1] and points[0][1] == points[1][1])):
        one = points[0][2]
    if points[1] and _ONE_TUPLE.fullmatch(one):
        other = points[1][2]
    if _ONE_TUPLE.fullmatch(other) and _LIST.fullmatch(one):
        return f"({one})", other
    if _ONE_TUPLE.fullmatch(one) and _LIST.fullmatch(other):
        return one, f"({other})"
    if _TUPLE.fullmatch(other):
        return vector(one) or one, other
    if _TUPLE.fullmatch(one):
        return one, vector(other) or other
    return one, other


def vector(text: str) -> str | None:
    r"""Return a matrix of one column or one row as a tuple; None for everything else.

    >>> vector(r"\begin{pmatrix}1\\2\end{pmatrix}"), vector(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}")
    ('(1,2)', None)
    """
    match = _VECTOR.fullmatch(text)
    if match is None or r"\begin" in match[2]:
        return None
    entries = match[2].strip().removesuffix(r"\\")
    separators = [mark for mark in ("&", r"\\") if mark in entries]
    return f"({entries.replace(separators[0], ',')})" if len(separators) == 1 else None


def assignments(text: str) -> str | None:
    """Return the values of several variables as a tuple; None for everything else.

    Neighbours in the alphabet come in its order: `y=2, x=1` is `(1,2)`.

    >>> assignments("y=2, x=1"), assignments("m=2, b=3"), assignments("x=1, x=2")
    ('(1,2)', '(2,3)', None)
    """
    matches = [_ASSIGNMENT.fullmatch(part.strip()) for part in _BETWEEN_VALUES.split(text)]
    pairs = [(match[1], match[2].strip()) for match in matches if match]
    names = sorted({name for name, _ in pairs})
    if len(names) < 2 or len(names) != len(matches):
        return None
    if ord(names[-1]) - ord(names[0]) == len(names) - 1:
        pairs.sort()
    return f"({','.join(value for _, value in pairs)})"


def _gives_one_of(text: str) -> bool:
    """Return whether an answer gives the value of one of several variables, as `x=1 or y=2`."""
    return _OR.search(text) is not None and assignments(_OR.sub(",", text)) is not None


def equal_in_this_process(gold: str, answer: str) -> bool:
    """Compare two LaTeX expressions; False if either cannot be read.

    Call it in a process's main thread.

    Raises:
        EnvironmentFailure: a package that reads formulas is not installed.
    """
    for name in ("math_verify", "latex2sympy2_extended"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise EnvironmentFailure(
                f"formulas need the package {error.name}, which is not installed: "
                "pip install math-verify latex2sympy2_extended"
            ) from error
    sides = (approximations(text) for text in (gold, answer))
    return any(
        _equal_formulas(*pair) if (equal := compare_plainly(*pair)) is None else equal
        for pair in product(*sides)
    )


def approximations(text: str) -> list[str]:
    r"""Return the sides of an approximation: `\sqrt2 \approx 1.41` gives two spellings of one answer.

    A false claim such as `25 \approx 26` gives none. Any other text gives itself.
    """
    sides = _APPROXIMATELY.split(_in_plain_characters(text))
    if len(sides) == 1:
        return [text]
    if len(sides) > MAX_APPROXIMATIONS:
        return []
    if _real_value(sides[0]) is None:  # a name, as in x \approx 3.14
        sides[:2] = [f"{sides[0]}={sides[1]}"]
    return sides if all(_rounds_to(*pair) for pair in pairwise(sides)) else []


def _rounds_to(text: str, rounded: str) -> bool:
    """Return whether a decimal is a number rounded or cut off; a whole number must be rounded."""
    exact = _real_value(text)
    number = as_number(spelled(percentage(rounded) or rounded))
    if exact is None or number is None:
        return False
    exponent = int(number.as_tuple().exponent)
    allowed = 10.0**exponent if exponent < 0 else 0.501
    return abs(exact - float(number)) < allowed


def _equal_formulas(gold: str, answer: str) -> bool:
    """Compare two LaTeX expressions that are not approximations."""
    gold, answer = _with_fourths(gold, answer), _with_fourths(answer, gold)
    gold, answer = _content(gold), _content(answer)
    gold, answer = _without_modulus(gold, answer), _without_modulus(answer, gold)
    if _gives_one_of(gold) != _gives_one_of(answer):
        return False
    gold, answer = _with_tuples(gold, answer)
    if any(
        _SET.fullmatch(a) and _ONE_TUPLE.fullmatch(b) for a, b in ((gold, answer), (answer, gold))
    ):
        return False
    for mark in (_PRIME, _ELLIPSIS):  # math_verify drops both
        if len(mark.findall(gold)) != len(mark.findall(answer)):
            return False
    if r"\pmod" in answer and "mod" not in gold:
        return False
    if (based := with_base(gold)) and re.fullmatch("[0-9A-Fa-f]+", answer):
        return based[0] == answer.lower().lstrip("0")
    if _OF_BASE.search(answer) and not _OF_BASE.search(gold):
        return False
    gold, answer = _in_radians(gold, answer), _in_radians(answer, gold)
    percentages = percentage(gold), percentage(answer)
    try:
        if percentages == (None, None):
            if max(gold.count(":"), answer.count(":")) > 1:
                return _equal_shares(gold.split(":"), answer.split(":"))
            return _equal_expressions(gold, answer) and _repeats_alike(gold, answer)
        if _equal_expressions(percentages[0] or gold, percentages[1] or answer):
            return True
        # A percentage also equals the share: 5 % is 5 and also 0.05.
        shares = [rf"({percent})/100" if percent else None for percent in percentages]
        return _equal_expressions(shares[0] or gold, shares[1] or answer)
    except Exception as error:  # noqa: BLE001  # the parser and SymPy raise anything over what a model wrote
        logger.debug("%.120r could not be compared with %.120r: %s", answer, gold, error)
        return False


@functools.cache
def _read_products() -> None:
    """Make latex2sympy2 read `{2}(3)` as a product.

    By itself it reads each integer with a positive fraction behind it as a mixed number, here 5. Only
    digits in front of a `\\frac` are one.
    """
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
    from sympy import Expr, Matrix

    original = _Latex2Sympy.convert_postfix_list

    def convert_postfix_list(self: Any, parts: list[Any], first: int = 0) -> Any:
        texts = [part.getText() for part in parts[first : first + 2]]
        if len(texts) < 2 or (texts[0].isdigit() and texts[1].lstrip("{").startswith(r"\frac")):
            return original(self, parts, first)
        left = self.convert_postfix(parts[first])
        if isinstance(left, list):  # a derivative
            return original(self, parts, first)
        if not isinstance(left, Expr | Matrix):
            return left
        right = self.convert_postfix_list(parts, first + 1)
        matrices = any(getattr(value, "is_Matrix", False) for value in (left, right))
        return (self.mat_mul_flat if matrices else self.mul_flat)(left, right)

    _Latex2Sympy.convert_postfix_list = convert_postfix_list


def _in_radians(text: str, other: str) -> str:
    """Return degrees as radians if the other answer has a multiple of pi instead of degrees."""
    degrees = _DEGREES.search(text)
    if degrees is None or r"\circ" in other or r"\pi" not in other:
        return text
    return rf"({text[: degrees.start()]})\frac{{\pi}}{{180}}"


def _repeats_alike(gold: str, answer: str) -> bool:
    """Return whether the answer repeats entries of a list as the gold answer does, as in `3, 3, 8`."""
    if not (_LIST.fullmatch(gold) and _LIST.fullmatch(answer)):
        return True
    expected, entries = (
        [entry.strip() for entry in re.split(r",(?!\d{3}(?!\d))|;", text)]
        for text in (gold, answer)
    )
    if len(set(expected)) == len(expected):
        return True
    return len(expected) == len(entries) and all(
        expected.count(entry) == sum(_equal_expressions(entry, each) for each in entries)
        for entry in set(expected)
    )


def _equal_shares(gold: list[str], answer: list[str]) -> bool:
    """Return whether two ratios of three or more are the same; a ratio of two has a value."""
    if len(gold) != len(answer) or _equal_expressions("0", answer[0]):
        return False
    return all(
        _equal_expressions(f"({share})({answer[0]})", f"({other})({gold[0]})")
        for share, other in zip(gold[1:], answer[1:], strict=True)
    )


def _parsed(text: str) -> list[Any]:
    """Return an expression as SymPy reads it and as text; nothing if it cannot be read."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    _read_products()
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
    values = parse(rf"\boxed{{{text}}}", reading, parsing_timeout=PARSE_SECONDS)
    united = [_united(value, text) for value in values]
    if united[:1] != values[:1]:
        del united[1:]  # the text, in which "or" and "and" are commas alike
    return [_with_imaginary_unit(_with_name_first(value)) for value in united]


def _real_value(text: str) -> float | None:
    """Return the number in front of any `%` in an expression or an equation's right side, or None."""
    content = _content(text.rpartition("=")[2])
    content = percentage(content) or content
    plain = as_number(content)
    if plain is not None:
        return float(plain)
    values = _parsed(content)
    number = _evaluated(values[0]) if values and getattr(values[0], "is_number", False) else None
    return None if number is None or number.imag else number.real


def _evaluated(value: Any) -> complex | None:
    """Return the value of a number; None if that takes too long, as for `9^{9^{9^9}}`."""
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    try:
        return timeout(PARSE_SECONDS)(lambda: complex(value.evalf()))()
    except (TimeoutException, ArithmeticError, TypeError, ValueError) as error:
        logger.debug("%.120r has no value: %s", value, error)
        return None


def _equal_expressions(gold: str, answer: str) -> bool:
    from math_verify import verify

    expected, parsed = _parsed(gold), _parsed(answer)
    if not expected or not parsed:
        return False
    if _is_equation(expected[0]) and not expected[0].free_symbols:
        expected = [_last_side(expected[0])]
    expected[0], parsed[0] = _as_graph(expected[0], parsed[0]), _as_graph(parsed[0], expected[0])
    if _is_equation(expected[0]):
        if not _is_equation(parsed[0]) and _is_curve(expected[0], gold):
            return False
        if getattr(expected[0].args[0], "is_Function", False) and not _is_equation(parsed[0]):
            expected = [expected[0].args[1]]  # f(x)=5 names 5
    elif _leaves_unsolved(parsed[0]):
        return False
    equal = verify(expected, parsed, timeout_seconds=PARSE_SECONDS, allow_set_relation_comp=True)
    return bool(equal) and not _are_small_and_differ(expected[0], parsed[0])


def _is_equation(value: Any) -> bool:
    from sympy import And, Eq

    return isinstance(value, Eq) or (isinstance(value, And) and value.has(Eq))


def _is_curve(value: Any, text: str) -> bool:
    """Return whether an equation relates variables, as `x+y=3`. `AB=3` names a length."""
    from sympy import Eq

    is_product = _PRODUCT_OF_VARIABLES.match(text) is not None
    return isinstance(value, Eq) and (value.lhs.is_Add or is_product)


def _last_side(value: Any) -> Any:
    """Return the 5 of `2+3=5` and of `2+3=4+1=5`."""
    while _is_equation(value):
        value = getattr(value, "_unsorted_args", value.args)[-1]
    return value


def _as_graph(value: Any, other: Any) -> Any:
    """Return `f(x)=…` as `y=…` if the other answer is that; any other value unchanged."""
    from sympy import Eq
    from sympy.core.function import AppliedUndef

    if not (isinstance(value, Eq) and isinstance(other, Eq) and str(other.lhs) == "y"):
        return value
    is_function = isinstance(value.lhs, AppliedUndef) and list(map(str, value.lhs.args)) == ["x"]
    return Eq(other.lhs, value.rhs, evaluate=False) if is_function else value


def _with_name_first(value: Any) -> Any:
    """Return `5=x` as `x=5`, and `f(2)=5` with a name in place of f(2); others unchanged.

    math_verify solves equations, and finds two without a variable equal.
    """
    from sympy import And, Eq, FiniteSet, Symbol
    from sympy.core.function import AppliedUndef

    if isinstance(value, FiniteSet):
        return FiniteSet(*map(_with_name_first, value))
    first = value._unsorted_args[0] if isinstance(value, And) else value
    if isinstance(first, Eq) and isinstance(first.lhs, AppliedUndef) and not value.free_symbols:
        if _leaves_unsolved(value):
            return value
        return Eq(Symbol(str(first.lhs)), _last_side(value), evaluate=False)
    if isinstance(value, Eq) and value.lhs.is_number and not value.rhs.is_number:
        return Eq(value.rhs, value.lhs, evaluate=False)
    return value


def _leaves_unsolved(value: Any) -> bool:
    """Return whether an answer is an equation whose right side is not its solution.

    That is so for `x^2=5` or `2x=5`, and for the false `4=5`. A sum such as `m+n=5`, and a function
    such as `f(x)=5`, name a value.
    """
    from sympy import Abs, And, Eq, FiniteSet
    from sympy.core.function import AppliedUndef

    if isinstance(value, FiniteSet):
        return any(_leaves_unsolved(each) for each in value)
    equations = value._unsorted_args if isinstance(value, And) else [value]
    if not all(isinstance(each, Eq) for each in equations):
        return False
    sides = dict.fromkeys(side for each in equations for side in each.args)
    numbers = [_evaluated(side) for side in sides if side.is_number]
    if not all(_are_close(*pair) for pair in pairwise(numbers)):
        return True
    named = equations[0].lhs
    is_formula = named.is_Add or named.is_Mul or named.is_Pow or isinstance(named, Abs)
    return is_formula and len(named.free_symbols) == 1 and not named.has(AppliedUndef)


def _united(value: Any, text: str) -> Any:
    """Return inequalities that "or" or "and" joins as one set of numbers; others unchanged."""
    from sympy import Eq, FiniteSet, Intersection, Ne, Rel, Union
    from sympy.logic.boolalg import Boolean

    words = set(re.findall(r"\b(?:or|and)\b", text))
    if not isinstance(value, FiniteSet) or len(words) != 1:
        return value
    if not all(
        isinstance(each, Boolean) and each.has(Rel) and not each.has(Eq, Ne) for each in value
    ):
        return value
    return (Union if "or" in words else Intersection)(*(each.as_set() for each in value))


def _with_imaginary_unit(value: Any) -> Any:
    """Return a value in which the symbol i is the imaginary unit."""
    from sympy import Eq, I

    if isinstance(value, Eq):  # SymPy takes variables for real, and z=2+3i for false
        return Eq(*map(_with_imaginary_unit, value.args), evaluate=False)
    letters = {each: I for each in getattr(value, "free_symbols", ()) if each.name == "i"}
    try:
        return value.xreplace(letters) if letters else value
    except TypeError:  # an index, as in i < 3
        return value


def _are_small_and_differ(one: Any, other: Any) -> bool:
    """Return whether two numbers below a thousandth differ by more than a thousandth of them.

    math_verify rounds to six decimal places, so that 2e-7 would equal 0.
    """
    if not all(getattr(value, "is_number", False) for value in (one, other)):
        return False
    values = [_evaluated(value) for value in (one, other)]
    if None in values:
        return False
    return max(map(abs, filter(None, values)), default=0) < SMALL and not _are_close(*values)


def _are_close(one: complex | None, other: complex | None) -> bool:
    """Return whether two numbers agree to a thousandth; a number without a value agrees with none."""
    if one is None or other is None:
        return False
    return abs(one - other) <= SMALL * max(abs(one), abs(other))


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
