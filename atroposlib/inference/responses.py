r"""Reading a model's response: its reasoning, its answer, and its calls of tools.

>>> answer_part("<think>4 or 5?</think>5"), answer_part("4 or 5?</think>5")
('5', '5')
>>> answer_part("4 or 5?", opened="<think>\n")
''

**Reasoning.** Many chat templates open the reasoning themselves: the prompt ends with `<think>`,
and the response begins inside the block. `opened_by` reads that from the prompt, and
`read_reasoning` takes it. docs/grading.md lists the rules. If a closing tag stands behind a block
without an opening one, everything before it is reasoning, too.

**Calls of tools.** `FORMATS` has one entry for each notation, by the name of vLLM's parser. The
notations come from the models' own chat templates and from the documentation of vLLM's
`--tool-call-parser`. An entry parses and renders calls. `ToolCallTranslator` uses it for OpenAI's
messages, `ToolFormat` for the conversations of environments.

One scan finds reasoning and calls together. A call inside of reasoning does not count, and a tag
inside of a call is text of its arguments. A plain value ends at its own closing tag, such as
`</parameter>`. An opening tag written twice counts once, and missing or `null` arguments count as
an empty object. docs/multi-turn.md lists the other rules. The time is linear in the length of the
text.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import uuid
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from atroposlib.errors import UsageError

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
    """Return the text of a response outside of its reasoning; empty if the reasoning never ends.

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


logger = logging.getLogger(__name__)


class ResponseDecoder:
    """A decoder of sampled tokens into text without special tokens.

    Some tokenizers hold the tags of reasoning as special tokens. These tags stay in the text, to
    show where the reasoning ends.

    Attributes:
        kept: the special tokens that stay.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token.content: number for number, token in added.items() if token.special}
        self.kept = frozenset(
            mark for marks in SPECIAL_MARKS if marks <= special.keys() for mark in marks
        )
        self._dropped = frozenset(
            number for mark, number in special.items() if mark not in self.kept
        )

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        if not self.kept:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        rest = [token for token in tokens if token not in self._dropped]
        return str(self.tokenizer.decode(rest, skip_special_tokens=False))


NO_TOOL = "-ERROR-"
MAX_UNREADABLE = 100
"""Unreadable calls of one response. Text behind them is not read: each may cost a look at all of
the text."""
MAX_LITERAL = 100_000
"""Characters of an object in Python's notation."""

Tools = Sequence[Mapping[str, Any]]

_DECODER = json.JSONDecoder(strict=False)
_PYTHON = re.compile(
    r"""'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[\](){}]""",
    re.DOTALL,
)
_SPACE = re.compile(r"\s*")


class Unreadable(ValueError):
    """A call that is begun and cannot be read.

    Attributes:
        end: one past its last character; None if a mark has to show that.
        seen: one past the last character that surely belongs to it. Marks before are text.
    """

    def __init__(self, why: str, end: int | None = None, seen: int = 0) -> None:
        super().__init__(why)
        self.end, self.seen = end, seen


@dataclass(frozen=True)
class ParsedCall:
    """A call in a text.

    Attributes:
        start, end: its first character, and one past the last. Calls of one list have the same
            ones.
        name: of the function; empty if the call cannot be read.
        arguments: by name; None if the call cannot be read.
        problem: the reason why the call cannot be read; empty if it can.
    """

    start: int
    end: int
    name: str
    arguments: dict[str, Any] | None
    problem: str = ""


class CallFormat(ABC):
    """One notation of calls.

    Attributes:
        opens: the mark that begins a call; None if there is none.
        bare: beginning of an answer that consists of calls without a mark; None if there is none.
        closes: the mark that ends a call; empty if there is none.
        exact: values are quoted, so that text which reads as a call is one. Inside of reasoning,
            tags are text in such calls alone.
    """

    opens: re.Pattern[str] | None = None
    bare: re.Pattern[str] | None = None
    closes: str = ""
    exact = True

    @property
    def unclosed(self) -> str:
        """The reason why a call without its closing mark cannot be read."""
        return f"a call that does not end with {self.closes}"

    @abstractmethod
    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ParsedCall], int]:
        """Read the calls that a mark begins.

        Returns:
            The calls, and one past their last character. Without calls, the mark is text.

        Raises:
            Unreadable: there is no call behind the mark.
        """

    @abstractmethod
    def render(self, name: str, arguments: Any) -> str:
        """Return a call as the model would write it."""

    def render_all(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Return several calls of one answer, each given as a name and its arguments."""
        return "\n".join(self.render(name, arguments) for name, arguments in calls)

    def calls_in(self, text: str) -> CallSpans:
        """Return a reader of the calls in a response, for `read_reasoning`."""
        return _Scan(self, text, ())

    def parse(self, text: str, tools: Tools = (), opened: str = "") -> list[ParsedCall]:
        """Return the calls of a response, in their order.

        Args:
            text: the response.
            tools: in OpenAI's form. Formats that write values as plain text take their types from
                them.
            opened: what the prompt opened; see `atroposlib.inference.responses.opened_by`.
        """
        scan = _Scan(self, text, tools)
        spans = read_reasoning(text, opened, scan).spans
        starts = [start for start, _ in spans]
        kept = []
        for call in scan.calls:
            place = bisect_right(starts, call.start) - 1
            if place >= 0 and call.start < spans[place][1]:
                continue  # a closing tag behind the call shows that all of it was reasoning
            if call.start in scan.bare and text_outside(text, spans, call.start).strip():
                continue
            kept.append(call)
        return kept + scan.stopped


def text_outside(text: str, spans: Sequence[tuple[int, int]], end: int) -> str:
    """Return the text before a position that is outside of all spans."""
    edges = [0, *(edge for span in spans if span[0] < end for edge in span), end]
    return "".join(text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))


class _Scan:
    """The calls in the parts of a response; see `atroposlib.inference.responses.CallSpans`.

    Attributes:
        calls: the calls that were read so far.
        bare: starts of calls without a mark.
        stopped: a last, unreadable call, if the rest of the text is not read.
    """

    def __init__(self, format: CallFormat, text: str, tools: Tools) -> None:
        self.format, self.text, self.tools = format, text, tools
        self.calls: list[ParsedCall] = []
        self.bare: set[int] = set()
        self.stopped: list[ParsedCall] = []
        self._failures = self._failures_inside = 0
        self._last = -1
        self._mark = format.opens and format.opens.search(text)

    def __call__(self, begin: int, end: int, inside: bool) -> list[tuple[int, int]]:
        if inside:
            return self._skipped(begin, end)
        cursor, before = begin, len(self.calls)
        if self.format.bare is not None and begin != self._last:
            mark = self.format.bare.match(self.text, begin)
            if mark is not None and mark.end() <= end:
                self.bare.add(mark.start())
                cursor = self._read(mark)
        while not self.stopped and (mark := self._next(cursor)) is not None and mark.start() < end:
            quoted = is_quoted(self.text, *mark.span())
            cursor = mark.end() if quoted else self._read(mark)
        places = [(call.start, call.end) for call in self.calls[before:]]
        self._last = max([begin, *(end for _, end in places[-1:])])
        return places

    def _skipped(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the places of the calls in a part of reasoning."""
        cursor, spans = begin, []
        while self.format.exact and self._failures_inside < MAX_UNREADABLE:
            mark = self._next(cursor)
            if mark is None or mark.start() >= end:
                break
            cursor = mark.end()
            if not is_quoted(self.text, *mark.span()):
                try:
                    calls, cursor = self.format.at(self.text, mark, self.tools)
                    if calls:
                        spans.append((mark.start(), cursor))
                except Unreadable:
                    self._failures_inside += 1
        return spans

    def _next(self, cursor: int) -> re.Match[str] | None:
        """Return the first mark at a position or behind it.

        Positions of successive calls must not fall.
        """
        if self._mark is not None and self._mark.start() < cursor:
            self._mark = self._mark.re.search(self.text, cursor)
        return self._mark

    def _read(self, mark: re.Match[str]) -> int:
        try:
            calls, end = self.format.at(self.text, mark, self.tools)
        except Unreadable as error:
            why, end = self._unreadable(error, mark)
            calls = [ParsedCall(mark.start(), end, "", None, why)]
            self._failures += 1
            if self._failures >= MAX_UNREADABLE:
                why = f"{MAX_UNREADABLE} calls cannot be read: the text behind them is not read"
                self.stopped = [ParsedCall(end, end, "", None, why)]
        self.calls += calls
        return max(end, mark.end())

    def _unreadable(self, error: Unreadable, mark: re.Match[str]) -> tuple[str, int]:
        """Return the reason why a call cannot be read, and its end.

        The call ends behind its closing mark, unless another call begins before that.
        """
        closes, seen = self.format.closes, max(error.seen, mark.end())
        if error.end is not None:
            is_cut = (
                closes and error.end == len(self.text) and not self.text.rstrip().endswith(closes)
            )
            return self.format.unclosed if is_cut else str(error), error.end
        if not closes:
            return str(error), seen
        close = self.text.find(closes, seen)
        if close < 0 or ((after := self._next(seen)) is not None and after.start() < close):
            return self.format.unclosed, seen
        return str(error), close + len(closes)


def skip_space(text: str, position: int) -> int:
    """Return the first position at or behind another one that holds no white space."""
    space = _SPACE.match(text, position)
    return space.end() if space is not None else position


def decode(text: str, start: int) -> tuple[Any, int]:
    """Return the object or list that begins at a position, and one past its last character.

    Models also write objects as Python does, with single quotes.

    Raises:
        Unreadable: there is none.
    """
    if text[start : start + 1] not in ("{", "["):
        raise Unreadable(
            f"a call is not a JSON object: it begins with {text[start : start + 20]!r}"
        )
    end, seen = None, start
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise Unreadable("a call is nested too deeply") from None
    except json.JSONDecodeError as error:
        why, seen = f"{error.msg}: character {error.pos - start}", error.pos
        if error.msg.startswith("Unterminated string"):
            end = len(text)  # all of the rest is text of that string
    except ValueError as error:  # a number of thousands of digits
        why = str(error)
    stop = literal_end(text, start)
    if stop is not None:
        try:
            return json.loads(json.dumps(ast.literal_eval(text[start:stop]))), stop
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    raise Unreadable(f"a call is not a JSON object: {why}", end, seen)


def literal_end(text: str, start: int) -> int | None:
    """Return the end of brackets in Python's notation; None if they are not closed within
    `MAX_LITERAL` characters.
    """
    depth = 0
    for token in _PYTHON.finditer(text, start, start + MAX_LITERAL):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if depth <= 0:
                return token.end()
    return None


def as_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call: an object, its text, or nothing.

    Raises:
        Unreadable: they are something else.
    """
    if isinstance(value, str) and value.strip():
        start = skip_space(value, 0)
        try:
            read, end = decode(value, start)
        except Unreadable as error:
            raise Unreadable(f"arguments must be an object: {error}") from None
        if not value[end:].strip():
            value = read
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping):
        raise Unreadable("arguments must be an object: name and value of each")
    return dict(value)


def as_call(value: Any, start: int, end: int) -> ParsedCall:
    """Return a call that was written as an object.

    OpenAI's form, with the call under `function`, is one too.
    """
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("name"), str)
        or not value["name"].strip()
    ):
        return ParsedCall(start, end, "", None, "a call has no name")
    written = value.get("arguments")
    if written is None:
        written = value.get("parameters")
    try:
        arguments = as_arguments(written)
    except Unreadable as error:
        return ParsedCall(start, end, "", None, str(error))
    return ParsedCall(start, end, value["name"].strip(), arguments)


def compact(value: Any) -> str:
    """Return a value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False)


def by_name(arguments: Any) -> Mapping[str, Any]:
    """Return arguments by name.

    Text that is not JSON becomes one argument of the name `arguments`.
    """
    if isinstance(arguments, Mapping):
        return arguments
    return {"arguments": arguments}


class JsonBetween(CallFormat):
    """JSON between two marks: an object for each call, or a list of them.

    Args:
        opening: the mark in front. Repeated marks are one.
        closing: the mark behind; empty if the JSON's end is the call's.
        many: write a list.
        arguments: name of the arguments' field in a call that is written. Both names are read.
        if_list: read a mark as text unless a list follows.
    """

    def __init__(
        self,
        opening: str,
        closing: str = "",
        many: bool = False,
        arguments: str = "arguments",
        if_list: bool = False,
    ) -> None:
        self.opens = re.compile(rf"(?:{re.escape(opening)}\s*)++" + (r"(?=\[)" if if_list else ""))
        self.closes = closing
        self.opening, self.many, self.arguments = opening, many, arguments

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ParsedCall], int]:
        value, end = decode(text, mark.end())
        if self.closes:
            behind = skip_space(text, end)
            if not text.startswith(self.closes, behind):
                rest = text[behind : behind + 20]
                why = f"{rest!r} follows the object of a call: write {self.closes} behind it"
                raise Unreadable(why, len(text) if self.closes.startswith(rest.strip()) else end)
            end = behind + len(self.closes)
        entries = value if isinstance(value, list) else [value]
        return [as_call(entry, mark.start(), end) for entry in entries], end

    def render(self, name: str, arguments: Any) -> str:
        call = {"name": name, self.arguments: arguments}
        between = (
            f"\n{compact(call)}\n"
            if self.closes and not self.many
            else compact([call] if self.many else call)
        )
        return f"{self.opening}{between}{self.closes}"


class BareJson(CallFormat):
    """Llama's notation: the answer begins with a JSON object, or has one behind `<|python_tag|>`.

    Several calls have `;` or white space between them. An object without a name, arguments and
    parameters is an answer in JSON rather than a call.
    """

    between = re.compile(r"[;\s]*(?=\{)")

    opens = re.compile(r"<\|python_tag\|>\s*")
    bare = re.compile(r"\s*(?=\{\s*[\"'}])")

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ParsedCall], int]:
        value, end = decode(text, mark.end())
        if not mark[0].strip() and not (
            "name" in value or "arguments" in value or "parameters" in value
        ):
            return [], mark.end()
        calls = [as_call(value, mark.start(), end)]
        while (more := self.between.match(text, end)) is not None:
            try:
                value, end = decode(text, more.end())
            except Unreadable as error:
                return [*calls, ParsedCall(mark.start(), end, "", None, str(error))], len(text)
            calls.append(as_call(value, mark.start(), end))
        return calls, end

    def render(self, name: str, arguments: Any) -> str:
        return compact({"name": name, "parameters": arguments})


class MistralJson(JsonBetween):
    """`[TOOL_CALLS]` and a list, or since 2025 `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    named = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ParsedCall], int]:
        named = self.named.match(text, mark.end())
        if named is None:
            return super().at(text, mark, tools)
        arguments, end = decode(text, named.end())
        return [ParsedCall(mark.start(), end, named[1], arguments)], end


class Pythonic(CallFormat):
    """A list of calls as Python writes them, `[weather(city="Rome"), stop()]`.

    Args:
        opening: the mark in front; empty if the answer begins with the list.
        closing: the mark behind.
    """

    def __init__(self, opening: str = "", closing: str = "") -> None:
        self.opening, self.closes = opening, closing
        if opening:
            self.opens = re.compile(rf"(?:{re.escape(opening)}\s*)++")
        else:
            self.bare = re.compile(r"\s*(?=\[\s*[A-Za-z_][\w.]*\s*\()")

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ParsedCall], int]:
        end = literal_end(text, mark.end()) if text.startswith("[", mark.end()) else None
        if end is None:
            raise Unreadable("a call is not in a list that ends with ]")
        written = text[mark.end() : end]
        if self.closes:
            behind = skip_space(text, end)
            if not text.startswith(self.closes, behind):
                raise Unreadable(self.unclosed)
            end = behind + len(self.closes)
        try:
            elements = ast.parse(written, mode="eval").body.elts  # type: ignore[attr-defined]
            calls = [
                ParsedCall(mark.start(), end, ast.unparse(call.func), plain_arguments(call))
                for call in elements
            ]
        except (
            SyntaxError,
            ValueError,
            TypeError,
            AttributeError,
            MemoryError,
            RecursionError,
        ) as error:
            raise Unreadable(f"a call is not as Python writes it: {error}") from None
        return calls, end

    def render(self, name: str, arguments: Any) -> str:
        return self.render_all([(name, arguments)])

    def render_all(self, calls: Iterable[tuple[str, Any]]) -> str:
        written = []
        for name, arguments in calls:
            keywords = ", ".join(f"{key}={value!r}" for key, value in by_name(arguments).items())
            written.append(f"{name}({keywords})")
        return f"{self.opening}[{', '.join(written)}]{self.closes}"


def plain_arguments(call: ast.Call) -> dict[str, Any]:
    """Return the keywords of a call, whose values must be literals that JSON can hold.

    Raises:
        ValueError, TypeError: one is something else, or is given without its name.
    """
    if call.args:
        raise ValueError("an argument without a name")
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    read: dict[str, Any] = json.loads(json.dumps(values))
    return read


class Marked(CallFormat):
    """A name and arguments between marks of their own.

    Args:
        opening: pattern of the mark in front. A call begins there, readable or not.
        head: pattern of all that stands before the arguments, the mark included, with the group
            `name`.
        tail: pattern of the end.
        closing: the mark at the end, as text.
        call: text of a call, with {name} and {body}.
        pair: pattern of an argument, with the groups `key` and `value`; None if the arguments are
            JSON.
        argument: text of an argument, with {key} and {value}.
    """

    def __init__(
        self,
        opening: str,
        head: str,
        tail: str,
        closing: str,
        call: str,
        pair: str | None = None,
        argument: str = "",
    ) -> None:
        self.opens = re.compile(opening)
        self.closes = closing
        self.exact = pair is None
        self._head, self._tail = re.compile(head), re.compile(tail)
        self._pair = None if pair is None else re.compile(pair, re.DOTALL)
        self._call, self._argument = call, argument

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ParsedCall], int]:
        head = self._head.match(text, mark.start())
        if head is None:
            raise Unreadable("a call has no name, or is not in the format of the tools")
        name = head["name"].strip()
        arguments, at = self._arguments(text, head.end(), tools, name)
        tail = self._tail.match(text, at)
        if tail is None:
            rest = text[at : at + 20]
            raise Unreadable(
                f"{rest!r} follows the arguments of {name!r:.50}: write {self.closes} behind them"
            )
        return [ParsedCall(mark.start(), tail.end(), name, arguments)], tail.end()

    def _arguments(self, text: str, at: int, tools: Tools, name: str) -> tuple[dict[str, Any], int]:
        if self._pair is None:
            at = skip_space(text, at)
            if self._tail.match(text, at):
                return {}, at
            value, end = decode(text, at)
            if not isinstance(value, Mapping):
                raise Unreadable("arguments must be an object: name and value of each")
            return dict(value), end
        types, arguments = types_of(tools, name), {}
        while (pair := self._pair.match(text, at)) is not None:
            key, at = pair["key"].strip(), pair.end()
            arguments[key] = typed(pair["value"], types.get(key, frozenset()))
        return arguments, at

    def render(self, name: str, arguments: Any) -> str:
        if self._pair is None:
            return self._call.format(name=name, body=compact(arguments))
        written = (
            self._argument.format(
                key=key, value=value if isinstance(value, str) else compact(value)
            )
            for key, value in by_name(arguments).items()
        )
        return self._call.format(name=name, body="".join(written))


def types_of(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """Return the JSON types of each parameter of a tool; empty if its schema is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {
                key: json_types(schema)
                for key, schema in properties.items()
                if isinstance(schema, Mapping)
            }
    return {}


def json_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a JSON schema allows; empty if it names none."""
    own = schema.get("type") or ()
    types = {own} if isinstance(own, str) else set(map(str, own))
    for other in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= json_types(other) if isinstance(other, Mapping) else set()
    return frozenset(types)


def typed(text: str, types: frozenset[str]) -> Any:
    """Return a value that was written as plain text.

    Args:
        text: the value.
        types: JSON types of the parameter; empty if they are not known.

    Returns:
        The text itself, if a string is allowed and the text is not of another allowed type, or if
        it is not JSON. The tool refuses what does not fit.
    """
    value = text.removeprefix("\n").removesuffix("\n")
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = {"True": True, "False": False, "None": None}.get(value, value)
    return (
        value if "string" in types and not types & JSON_TYPES.get(type(read), frozenset()) else read
    )


JSON_TYPES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def xml(tag: str) -> Marked:
    """Return the notation of Qwen's coders.

    `tag` stands around each call, and may be missing in front.
    """
    return Marked(
        opening=rf"(?:<{tag}>\s*)++(?:<function=)?+|<function=",
        head=rf"(?:<{tag}>\s*)*+<function=(?P<name>[^>\n]+)>",
        pair=r"\s*<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
        tail=rf"\s*(?:</function>(?:\s*</{tag}>)?+|</{tag}>)",
        closing=f"</{tag}>",
        call=f"<{tag}>\n<function={{name}}>\n{{body}}</function>\n</{tag}>",
        argument="<parameter={key}>\n{value}\n</parameter>\n",
    )


HERMES = JsonBetween("<tool_call>", "</tool_call>")
GLM = Marked(
    opening=r"(?:<tool_call>\s*)++",
    head=r"(?:<tool_call>\s*)++(?P<name>[^\s<{]+)",
    pair=r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    tail=r"\s*</tool_call>",
    closing="</tool_call>",
    call="<tool_call>{name}\n{body}</tool_call>",
    argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
)

FORMATS: dict[str, CallFormat] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3", "qwen3_json", "granite4"), HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), xml("tool_call")),
    "seed_oss": xml("seed:tool_call"),
    **dict.fromkeys(("llama3_json", "llama4_json"), BareJson()),
    "mistral": MistralJson("[TOOL_CALLS]", many=True),
    **dict.fromkeys(
        ("jamba", "hunyuan_a13b"), JsonBetween("<tool_calls>", "</tool_calls>", many=True)
    ),
    "granite": JsonBetween("<|tool_call|>", many=True),
    "granite-20b-fc": JsonBetween("<function_call>"),
    "internlm": JsonBetween("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters"),
    "phi4_mini_json": JsonBetween("functools", many=True, if_list=True),
    "longcat": JsonBetween("<longcat_tool_call>", "</longcat_tool_call>"),
    "pythonic": Pythonic(),
    "llama4_pythonic": Pythonic("<|python_start|>", "<|python_end|>"),
    "olmo3": Pythonic("<function_calls>", "</function_calls>"),
    "lfm2": Pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek_v3": Marked(
        opening="<｜tool▁call▁begin｜>",
        head=r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        tail=r"\s*```\s*<｜tool▁call▁end｜>",
        closing="<｜tool▁call▁end｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": Marked(
        opening="<｜tool▁call▁begin｜>",
        head=r"<｜tool▁call▁begin｜>(?P<name>[^<{]+)<｜tool▁sep｜>",
        tail=r"\s*<｜tool▁call▁end｜>",
        closing="<｜tool▁call▁end｜>",
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{body}<｜tool▁call▁end｜>",
    ),
    "kimi_k2": Marked(
        opening=r"<\|tool_call_begin\|>",
        head=r"<\|tool_call_begin\|>\s*functions\.(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>",
        tail=r"\s*<\|tool_call_end\|>",
        closing="<|tool_call_end|>",
        call="<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{body}<|tool_call_end|>",
    ),
    **dict.fromkeys(("glm45", "glm47"), GLM),
    "minimax_m2": Marked(
        opening="<invoke",
        head=r"<invoke name=\"?(?P<name>[^\">]+)\"?>",
        pair=r"\s*<parameter name=\"?(?P<key>[^\">]+)\"?>(?P<value>.*?)</parameter>",
        tail=r"\s*</invoke>",
        closing="</invoke>",
        call='<minimax:tool_call>\n<invoke name="{name}">\n{body}</invoke>\n</minimax:tool_call>',
        argument='<parameter name="{key}">{value}</parameter>\n',
    ),
}
"""By the names of vLLM's parsers."""


SECTION_MARKS = ("<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<minimax:tool_call>")
"""Marks around all calls of an answer, of the formats that have some."""


def content_before(text: str, calls: Sequence[ParsedCall]) -> str | None:
    """Return the text before the first call, without the marks that open a section of calls."""
    before = text[: calls[0].start]
    for mark in SECTION_MARKS:
        before = before.replace(mark, "")
    return before.strip() or None


def parse_tool_call(
    response: str,
    available_tools: Iterable[dict[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, dict[str, Any], bool]:
    """Return the first call: name of the tool, its arguments, and True if something is wrong.

    Args:
        response: the model's text.
        available_tools: as in a chat request. The name must be among them.
        preferred_tags: names of tags, the first one that occurs counts; `tool_call` by default.

    Returns:
        The name is `-ERROR-` if something is wrong.
    """
    calls: list[ParsedCall] = []
    for tag in preferred_tags or ("tool_call",):
        calls = calls or JsonBetween(f"<{tag}>", f"</{tag}>").parse(response)
    if not calls or calls[0].arguments is None:
        if calls:
            logger.warning("a tool call cannot be read: %s", calls[0].problem)
        return NO_TOOL, {}, True
    name, arguments = calls[0].name, calls[0].arguments
    if available_tools:
        names = {
            tool.get("name") or tool.get("function", {}).get("name") for tool in available_tools
        }
        if name not in names:
            return NO_TOOL, arguments, True
    return name, arguments, False


class ToolCall(dict[str, Any]):
    """A call in OpenAI's JSON.

    Its fields are attributes too: `call["function"]["name"]`, `call.function.name`.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a tool call has no {name!r}; it has {', '.join(self)}") from None


@dataclass(frozen=True)
class Answer:
    """An answer of the model, and how it was read. A message with the same content and calls is
    this text again.

    Attributes:
        raw: all of its text.
        content: the text before its calls.
        ids: of its calls.
        problems: reasons why further calls could not be read.
    """

    raw: str
    content: str | None
    ids: tuple[str, ...]
    problems: tuple[str, ...] = ()


class ToolCallTranslator:
    """Translator of one conversation's calls, in both directions.

    It remembers the text of each answer with calls, so that the text comes back unchanged.

    Args:
        tokenizer: decodes, see `decode_with_tool_awareness`.
        parser_name: how the model writes calls, by the name of vLLM's parser: one of `FORMATS`.

    Raises:
        ValueError: another format.
    """

    def __init__(self, tokenizer: Any, parser_name: str = "hermes"):
        if parser_name not in FORMATS:
            raise ValueError(
                f"tool parser {parser_name!r} is not known: choose one of {', '.join(FORMATS)}"
            )
        self.tokenizer = tokenizer
        self._decode = ResponseDecoder(tokenizer)
        self.parser_name = parser_name
        self.format = FORMATS[parser_name]
        self.answers: dict[str, Answer] = {}
        """By the id of each call."""
        self._unreadable: dict[str, tuple[str, ...]] = {}
        """Text of each answer in which no call could be read, and the reasons."""

    def parse_model_output(
        self,
        raw_text: str,
        tool_choice: Any = None,
        tools: list[dict[str, Any]] | None = None,
        opened: str = "",
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """Return the text before the calls, the calls, and the finish reason.

        Text in which no call can be read comes back as plain text, so nothing that the model wrote
        is lost. `problems_of` has the reasons, and `with_problems` puts them into the history.

        Args:
            raw_text: all of the answer.
            tool_choice, tools: of the request.
            opened: what the prompt opened; see `atroposlib.inference.responses.opened_by`.
        """
        if not tools or tool_choice == "none":
            return raw_text, None, "stop"
        parsed = self.format.parse(raw_text, tools, opened)
        problems = tuple(dict.fromkeys(call.problem for call in parsed if call.problem))
        for problem in problems:
            logger.warning("a tool call cannot be read: %.300s", problem)
        readable = [call for call in parsed if not call.problem]
        if not readable:
            if problems:
                self._unreadable[raw_text.strip()] = problems
            return raw_text, None, "stop"
        calls = []
        for one in readable:
            function = ToolCall(name=sendable(one.name), arguments=as_json(one.arguments))
            calls.append(
                ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=function)
            )
        content = content_before(raw_text, parsed)
        answer = Answer(raw_text, content, tuple(call["id"] for call in calls), problems)
        self.answers.update(dict.fromkeys(answer.ids, answer))
        return content, calls, "tool_calls"

    def problems_of(self, message: dict[str, Any]) -> tuple[str, ...]:
        """Return the reasons why calls in an answer from here could not be read."""
        if message.get("role") != "assistant":
            return ()
        if calls := message.get("tool_calls"):
            answer = self._answer_of([as_dict(call) for call in calls])
            return () if answer is None else answer.problems
        return self._unreadable.get((message.get("content") or "").strip(), ())

    def with_problems(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in which the model reads why its calls could not be read.

        The reasons stand in front of the message that follows the answer. A message of their own
        would break templates in which roles alternate.

        Args:
            messages: with text as their contents.
        """
        completed: list[dict[str, Any]] = []
        waiting: tuple[str, ...] = ()
        for message in messages:
            if waiting and message.get("role") != "assistant":
                reasons = "\n".join(
                    f"error: a tool call cannot be read: {problem}" for problem in waiting
                )
                message = message | {"content": f"{reasons}\n\n{message.get('content') or ''}"}
                waiting = ()
            waiting = self.problems_of(message) or waiting
            completed.append(message)
        return completed

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: list[Any]) -> str:
        """Return the text of calls: the model's own if they are all of one answer from here, else a
        new one.
        """
        calls = [as_dict(call) for call in tool_calls]
        answer = self._answer_of(calls)
        if answer is None:
            return self._written(calls)
        return answer.raw

    def _answer_of(self, calls: list[dict[str, Any]]) -> Answer | None:
        """Return the answer that consisted of exactly these calls."""
        ids = tuple(call.get("id") or "" for call in calls)
        answer = self.answers.get(next(iter(ids), ""))
        if answer is None or answer.ids != ids:
            return None
        return answer

    def _written(self, calls: list[dict[str, Any]]) -> str:
        functions = [as_dict(call["function"]) for call in calls]
        arguments = [decoded(function.get("arguments") or {}) for function in functions]
        return self.format.render_all(
            zip((function["name"] for function in functions), arguments, strict=True)
        )

    def convert_messages_for_template(self, messages: list[Any]) -> list[dict[str, Any]]:
        """Return messages with the assistant's calls as text again, so that the prompt begins with
        the sampled text.
        """
        converted = []
        for message in map(as_dict, messages):
            if message.get("role") == "assistant" and message.get("tool_calls"):
                calls = [as_dict(call) for call in message["tool_calls"]]
                content, answer = message.get("content") or None, self._answer_of(calls)
                if answer is not None and content == answer.content:
                    text = answer.raw
                else:
                    text = "\n".join(part for part in (content, self._written(calls)) if part)
                message = {key: value for key, value in message.items() if key != "tool_calls"} | {
                    "content": text
                }
            converted.append(message)
        return converted

    def decode_with_tool_awareness(self, token_ids: list[int], has_tools: bool = False) -> str:
        """Return the text of tokens.

        With tools, marks of calls that are special tokens of the tokenizer stay in it.
        """
        if not has_tools:
            return self._decode(token_ids)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        marks = self.format.render("f", {"x": "y"})
        for special in self.tokenizer.all_special_tokens:
            if "tool" not in special and special not in marks and special not in self._decode.kept:
                text = text.replace(special, "")
        return text


def sendable(text: str) -> str:
    """Return text that UTF-8 can hold. A model can write half of a surrogate pair in JSON."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def as_json(arguments: Any) -> str:
    """Return arguments as JSON that UTF-8 can hold, with as few escapes as possible."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if sendable(text) == text else json.dumps(arguments)


def decoded(arguments: Any) -> Any:
    """Return arguments of a call as JSON's values. Text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def as_dict(message: Any) -> dict[str, Any]:
    """Return a message, given as a dict or as one of OpenAI's models, as a dict."""
    if isinstance(message, Mapping):
        return dict(message)
    return message.model_dump(exclude_none=True, warnings=False)


Problem = Literal[
    "unreadable",
    "unknown_tool",
    "wrong_arguments",
    "too_many",
    "raised",
    "timeout",
    "not_text",
    "cut",
]
MAX_REASON = 200
"""Characters of the reason why a call cannot be read."""


class Described(Protocol):
    """The part of a tool that a format uses.

    Attributes:
        schema: as in a chat request: `{"type": "function", "function": {name, description,
            parameters}}`.
    """

    schema: dict[str, Any]


@dataclass
class Call:
    """A call that the model wrote.

    Attributes:
        name: of the tool; empty where it cannot be read.
        arguments: as the model wrote them, by name.
        problem: the kind of fault; None if there was none. After "cut" the answer is there, but for
            its end.
        answer: the text that the model gets.
        span: first, and one past the last character of the call in the text that was read.
    """

    name: str
    arguments: dict[str, Any] | None = None
    problem: Problem | None = None
    answer: str = ""
    span: tuple[int, int] | None = None


class ToolFormat(ABC):
    """A notation for tools, calls and answers.

    Attributes:
        in_template: the model's chat template shows it the tools, if it can; `describe` is for
            templates that cannot.
        role: of the message that answers a call. Templates without a role "tool" take "user".
    """

    in_template = False

    def __init__(self, role: str = "tool"):
        self.role = role

    def describe(self, tools: Sequence[Described]) -> str:
        """Return the system message's text about them; empty for nothing."""
        return ""

    @abstractmethod
    def read(self, text: str) -> list[Call]:
        """Return the calls of a response, in their order.

        Args:
            text: the response with its reasoning. If the prompt opened the reasoning, the opening
                tag stands in front.

        Returns:
            A call that cannot be read has the problem "unreadable", and the reason as its answer.
        """

    def read_with(self, text: str, tools: Sequence[Described]) -> list[Call]:
        """As `read`, for formats that take the types of plain values from the tools."""
        return self.read(text)

    def answer(self, call: Call) -> dict[str, Any]:
        """Return the message that answers a call."""
        return {"role": self.role, "content": call.answer}


class NamedFormat(ToolFormat):
    """The notation of a family of models, by the name of vLLM's parser for it, such as
    `llama3_json` or `mistral`.

    A call inside of reasoning does not count; see docs/multi-turn.md.

    Args:
        name: one of `FORMATS`.
        role: see `ToolFormat`.

    Raises:
        UsageError: there is none of that name.
    """

    in_template = True

    def __init__(self, name: str, role: str = "tool"):
        super().__init__(role)
        if name not in FORMATS:
            raise UsageError(
                f"no tool format is called {name!r}: choose one of {', '.join(FORMATS)}"
            )
        self._format = FORMATS[name]

    def describe(self, tools: Sequence[Described]) -> str:
        """Return one line of JSON for each tool, and a call as the model would write it."""
        lines = "\n".join(json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools)
        example = self._format.render("name", {"argument": "value"})
        return f"You can call these tools:\n{lines}\n\nA call looks like this; the next message has its answer:\n{example}"

    def read(self, text: str) -> list[Call]:
        return self.read_with(text, ())

    def read_with(self, text: str, tools: Sequence[Described]) -> list[Call]:
        """As `read`, with the tools whose schemas have the types of plain values."""
        return list(map(as_read, self._format.parse(text, [tool.schema for tool in tools])))


class HermesFormat(NamedFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, on which Hermes and Qwen models are
    trained.
    """

    def __init__(self, role: str = "tool"):
        super().__init__("hermes", role)

    def describe(self, tools: Sequence[Described]) -> str:
        """Return one line of JSON for each tool, and an explanation of a call."""
        lines = "\n".join(json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You can call these tools:\n{lines}\n\nA call is a JSON object between tags; the next message has its answer:\n"
            '<tool_call>\n{"name": "the tool\'s name", "arguments": {"argument": "value"}}\n</tool_call>'
        )

    def answer(self, call: Call) -> dict[str, Any]:
        """Return OpenAI's message, or a user's message with the answer between tags."""
        if self.role == "tool":
            return {"role": "tool", "name": call.name, "content": call.answer}
        return {"role": self.role, "content": f"<tool_response>\n{call.answer}\n</tool_response>"}


class TaggedFormat(ToolFormat):
    """One tool with one argument, as plain text between two marks: a few tokens, for small models.

    A call inside of reasoning does not count.

    Args:
        tool: its name.
        argument: its parameter.
        begin: before the argument.
        end: after it.
        hint: text of the system message; empty for a model that needs none.
    """

    def __init__(
        self, tool: str, argument: str, begin: str, end: str, role: str = "tool", hint: str = ""
    ):
        super().__init__(role)
        self.tool, self.argument, self.begin, self.end, self.hint = tool, argument, begin, end, hint
        self._notation = _TextBetween(tool, argument, begin, end)

    def describe(self, tools: Sequence[Described]) -> str:
        return self.hint

    def read(self, text: str) -> list[Call]:
        return list(map(as_read, self._notation.parse(text)))


class _TextBetween(CallFormat):
    """The notation of `TaggedFormat`."""

    exact = False

    def __init__(self, tool: str, argument: str, begin: str, end: str):
        self.opens = re.compile(re.escape(begin))
        self.closes = end
        self._tool, self._argument, self._begin = tool, argument, begin

    @property
    def unclosed(self) -> str:
        return f"{self.closes!r} is missing"

    def render(self, name: str, arguments: Any) -> str:
        return f"{self._begin}{by_name(arguments).get(self._argument, '')}{self.closes}"

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ParsedCall], int]:
        close = text.find(self.closes, mark.end())
        if close < 0 or text.find(self._begin, mark.end(), close) >= 0:
            raise Unreadable(self.unclosed)
        end = close + len(self.closes)
        return [
            ParsedCall(
                mark.start(), end, self._tool, {self._argument: text[mark.end() : close].strip()}
            )
        ], end


def as_read(parsed: ParsedCall) -> Call:
    """Return a parsed call as one to answer."""
    span = (parsed.start, parsed.end)
    if parsed.arguments is None:
        return Call("", None, "unreadable", f"error: {parsed.problem[:MAX_REASON]}", span)
    return Call(parsed.name, parsed.arguments, span=span)
