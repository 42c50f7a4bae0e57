r"""The answer in `\boxed{…}` or `\fbox{…}`.

The rules, which docs/grading.md repeats:

- Braces inside a box are balanced; escaped braces do not count.
- `\boxed 5`, without braces, holds everything up to the next space or `$`, without punctuation behind it.
- A box inside a box counts as its content.
- The last box is the answer. Several boxes that only `,`, `;`, "and" or "or" separate are one list.
- If the last box is never closed, the response was cut off and has no answer.

Every function reads a text once, from left to right, so that megabytes of open braces cost no more than
other text.
"""

import re
from dataclasses import dataclass

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
