r"""Tell the reasoning in a response from its answer. Pure.

>>> answer_part("<think>4 or 5?</think>5"), answer_part("4 or 5?</think>5")
('5', '5')
>>> answer_part("4 or 5?", opened="<think>\n")
''

Many chat templates open the reasoning themselves: the prompt ends with `<think>`, and the response
begins inside the block. `opened_by` reads that from the prompt, and `read_reasoning` takes it.
docs/grading.md lists the rules. If a closing tag stands behind a block without an opening one, everything
before it is reasoning, too.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""Opening and closing tag of each kind of reasoning block."""

HARMONY_CHANNEL = "<|channel|>"
HARMONY_END = "<|end|>"
"""The end of every message of the gpt-oss format. By itself it does not end a block of
reasoning."""
HARMONY_MARKS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)(?: <\|constrain\|>\w+)?<\|message\|>"
    r"|<\|(?:end|return)\|>"
)
"""Marks around the visible messages of that format."""

SPECIAL_MARKS: tuple[frozenset[str], ...] = (
    *(frozenset(pair) for pair in TAGS[:-2]),
    frozenset({"<|channel>", "<channel|>"}),
    frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}),
)
"""The tokens of each kind that some tokenizers hold as special ones. A decoder must not drop
them."""

_FLAGS = re.IGNORECASE
_ANY_TAG = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair), _FLAGS)
_CLOSE_OF = {opening.lower(): closing.lower() for opening, closing in TAGS}
_IMPLIED = frozenset(closing.lower() for _, closing in TAGS) - {HARMONY_END}
_AT_PROMPT_END = re.compile(
    "(?:"
    + "|".join(
        rf"{re.escape(opening)}\s*(?:{re.escape(closing)}\s*)?"
        + (rf"|{re.escape(closing)}\s*" if closing != HARMONY_END else "")
        for opening, closing in TAGS
    )
    + r")\Z",
    _FLAGS,
)
_MAX_END = 200
"""Characters at the end of a prompt in which `opened_by` looks for a tag."""
_FENCE = re.compile(r"(?:^|(?<=[>\]▷]))[ \t]*(```+|~~~+)[ \t]*(\S?)", re.MULTILINE)
"""A line that begins or ends a fenced block. A closing tag may stand directly before it."""


@dataclass(frozen=True)
class Reasoned:
    """A response, taken apart.

    Attributes:
        blocks: text of each reasoning block, without its tags.
        answer: text outside of the blocks.
        closed: False if the response ends inside a block.
        spans: (first, one past the last) character of each block in the response, tags included.
        insides: the same without the tags.
        opening: text before the first block; all of the answer if there is no block.
    """

    blocks: tuple[str, ...]
    answer: str
    closed: bool
    spans: tuple[tuple[int, int], ...]
    insides: tuple[tuple[int, int], ...]
    opening: str

    @property
    def reasoning(self) -> str:
        """The text of all blocks, one below the other."""
        return "\n".join(self.blocks)


def opened_by(prompt: str) -> str:
    r"""Return the tags that end a prompt and belong to the response, with white space.

    >>> opened_by("<|im_start|>assistant\n<think>\n"), opened_by("<|im_start|>assistant\n")
    ('<think>\n', '')

    Args:
        prompt: its text, special tokens included.

    Returns:
        An opening tag, the tags of an empty block, a lone closing tag, or nothing.
    """
    match = _AT_PROMPT_END.search(prompt[-_MAX_END:])
    return match[0] if match else ""


def answer_part(text: str, opened: str = "") -> str:
    """Return what a response says outside of its reasoning; empty if the reasoning never ends.

    Args:
        text: the response.
        opened: what the prompt opened; see `opened_by`.
    """
    return read_reasoning(text, opened).answer


def whole_response(text: str, opened: str) -> str:
    r"""Return a response with its opening tag in front, if the prompt left a block open.

    >>> whole_response("5?</think>4", "<think>\n"), whole_response("4", "<think>\n\n</think>\n\n")
    ('<think>\n5?</think>4', '4')
    """
    if leaves_open(opened) and not text.lstrip().startswith(opened.strip()):
        return opened + text
    return text


CallSpans = Callable[[int, int, bool], Sequence[tuple[int, int]]]
"""A reader of calls of tools in parts of a response.

It takes the first character of a part, one past the last, and True if the part is reasoning. It
returns (first, one past the last) character of each call that begins in the part, in their order.
The last one may end behind the part.
"""


def read_reasoning(text: str, opened: str = "", calls: CallSpans | None = None) -> Reasoned:
    """Take a response apart.

    A closing tag without an opening one ends a block that began with the response. A tag in quotes
    is text, and so is a tag inside a fenced block of code of the answer.

    Args:
        text: the response.
        opened: what the prompt opened; see `opened_by`.
        calls: reads the calls of tools; tags inside of a call are text.
    """
    spans: list[tuple[int, int]] = []
    inside: list[tuple[int, int]] = []
    waits_for = _left_open(opened)
    begin = inner = 0  # of the block that is open: with its tag, and behind it
    fences = _Fences(text)
    region = cursor = 0  # cursor: calls are read up to here
    for start, end, tag in _tags(text):
        if waits_for is not None and tag != waits_for:
            continue
        if calls is not None and cursor <= start:
            for call in calls(cursor, start, waits_for is not None):
                fences.ignore(*call)
                cursor = max(cursor, call[1])
        if start < cursor:
            continue
        if waits_for is not None:
            spans.append((begin, end))
            inside.append((inner, start))
            waits_for, region, cursor = None, end, end
            continue
        if fences.hold(start, region):
            continue
        if tag in _CLOSE_OF:
            waits_for, begin, inner, cursor = _CLOSE_OF[tag], start, end, end
        elif tag in _IMPLIED:
            # Nothing is open: all that was written so far is reasoning.
            spans, inside, region, cursor = [(0, end)], [(0, start)], end, end
    if waits_for is None and calls is not None:
        calls(cursor, len(text), False)
    if waits_for is not None:
        spans.append((begin, len(text)))
        inside.append((inner, len(text)))
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    visible = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    if HARMONY_CHANNEL in text:
        visible = [HARMONY_MARKS.sub("", part) for part in visible]
    blocks = tuple(text[a:b] for a, b in inside)
    return Reasoned(
        blocks, "".join(visible), waits_for is None, tuple(spans), tuple(inside), visible[0]
    )


def known_calls(spans: Sequence[tuple[int, int]]) -> CallSpans:
    """Return a reader of calls whose places are known already.

    Args:
        spans: first, and one past the last character of each call, in their order.
    """
    starts = [start for start, _ in spans]
    return lambda begin, end, inside: spans[bisect_left(starts, begin) : bisect_left(starts, end)]


def leaves_open(opened: str) -> bool:
    """Return True if a response begins inside of a block that the prompt opened; see `opened_by`."""
    return _left_open(opened) is not None


def _left_open(opened: str) -> str | None:
    """Return the closing tag of the block that the prompt left open, in lower case."""
    tags = [match[0].lower() for match in _ANY_TAG.finditer(opened)]
    return _CLOSE_OF.get(tags[-1]) if tags else None


def _tags(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and lower-case text of each tag that is not quoted."""
    for match in _ANY_TAG.finditer(text):
        if not is_quoted(text, *match.span()):
            yield *match.span(), match[0].lower()


def is_quoted(text: str, start: int, end: int) -> bool:
    """Return True if a tag stands alone between an opening and a closing quote of one kind."""
    if not 0 < start <= end < len(text) or text[start - 1] != text[end] or text[end] not in "`'\"":
        return False
    # `"a"</think>"a"` has a quote on both sides, too. There the one before the tag closes.
    earliest = max(start - _MAX_END, 0)
    line = max(text.rfind("\n", earliest, start), earliest - 1) + 1
    return text.count(text[end], line, start) % 2 == 1


class _Fences:
    """Fenced blocks of code in a text, read as far as they are needed, in linear time."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ignored: list[tuple[int, int]] = []
        self._no_closing: dict[
            str, int
        ] = {}  # character -> shortest opening without a closing line
        self._region = -1
        self._at = 0
        self._block = (-1, -1)

    @cached_property
    def _lines(self) -> list[tuple[int, str, int, bool]]:
        """Start, character, length and whether text follows, of each line that may begin or end a
        block.
        """
        fences = _FENCE.finditer(self._text)
        return [(match.start(1), match[1][0], len(match[1]), bool(match[2])) for match in fences]

    @cached_property
    def _starts(self) -> list[int]:
        return [line[0] for line in self._lines]

    def ignore(self, begin: int, end: int) -> None:
        """Pass over the lines in a part of the text.

        Parts of successive calls must not overlap, nor fall.
        """
        self._ignored.append((begin, end))

    def hold(self, position: int, region: int) -> bool:
        """Return True if a closed block that begins at `region` or later holds a position.

        Positions and regions of successive calls must not fall.
        """
        if region != self._region:
            self._region, self._at, self._block = (
                region,
                bisect_left(self._starts, region),
                (-1, -1),
            )
        while (
            self._block[1] <= position
            and self._at < len(self._lines)
            and self._starts[self._at] < position
        ):
            closing = None if self._is_ignored(self._at) else self._closing(self._at)
            if closing is not None:
                self._block = (self._starts[self._at], self._starts[closing])
            self._at = self._at + 1 if closing is None else closing + 1
        return self._block[0] < position < self._block[1]

    def _is_ignored(self, index: int) -> bool:
        part = bisect_right(self._ignored, (self._starts[index], len(self._text))) - 1
        return part >= 0 and self._starts[index] < self._ignored[part][1]

    def _closing(self, opening: int) -> int | None:
        _, character, length, _ = self._lines[opening]
        if length >= self._no_closing.get(character, length + 1):
            return None
        for index in range(opening + 1, len(self._lines)):
            _, kind, other, has_info = self._lines[index]
            if (
                kind == character
                and other >= length
                and not has_info
                and not self._is_ignored(index)
            ):
                return index
        self._no_closing[character] = length
        return None
