"""Read the calls of tools that a model wrote. Pure.

One scan finds reasoning and calls together: a call inside of reasoning does not count, and a tag
inside of a call is text of its arguments. A plain value ends at its own closing tag, such as `</parameter>`.
An opening tag written twice counts once, and no arguments or `null` are no arguments. docs/multi-turn.md
lists the other rules. The time is linear in the length of the text.
"""

import ast
import json
import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.utils.thinking import CallSpans, is_quoted, read_reasoning

logger = logging.getLogger(__name__)

NO_TOOL = "-ERROR-"
MOST_UNREADABLE = 100
"""Unreadable calls of one response. What follows them is not read: each may cost a look at all of the text."""
MOST_LITERAL = 100_000
"""Characters of an object in Python's notation."""

Tools = Sequence[Mapping[str, Any]]

_DECODER = json.JSONDecoder(strict=False)
_PYTHON = re.compile(
    r"""'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[\](){}]""", re.DOTALL
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
class Found:
    """A call in a text.

    Attributes:
        start, end: its first character, and one past the last. Calls of one list have the same ones.
        name: of the function; empty if the call cannot be read.
        arguments: by name; None if the call cannot be read.
        problem: the reason why the call cannot be read; empty if it can.
    """

    start: int
    end: int
    name: str
    arguments: dict[str, Any] | None
    problem: str = ""


class CallReader(ABC):
    """A reader of one notation of calls.

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
    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[Found], int]:
        """Read the calls that a mark begins.

        Returns:
            The calls, and one past their last character. Without calls, the mark is text.

        Raises:
            Unreadable: there is no call behind the mark.
        """

    def calls_in(self, text: str) -> CallSpans:
        """Return a reader of the calls in a response, for `read_reasoning`."""
        return _Scan(self, text, ())

    def read(self, text: str, tools: Tools = (), opened: str = "") -> list[Found]:
        """Return the calls of a response, in their order.

        Args:
            text: the response.
            tools: in OpenAI's form. Formats that write values as plain text take their types from them.
            opened: what the prompt opened; see `atroposlib.utils.thinking.opened_by`.
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
    """The calls in the parts of a response; see `atroposlib.utils.thinking.CallSpans`.

    Attributes:
        calls: those that were found so far.
        bare: starts of calls without a mark.
        stopped: a last, unreadable call, if the rest of the text is not read.
    """

    def __init__(self, reader: CallReader, text: str, tools: Tools) -> None:
        self.reader, self.text, self.tools = reader, text, tools
        self.calls: list[Found] = []
        self.bare: set[int] = set()
        self.stopped: list[Found] = []
        self._failures = self._failures_inside = 0
        self._last = -1
        self._mark = reader.opens.search(text) if reader.opens is not None else None

    def __call__(self, begin: int, end: int, inside: bool) -> list[tuple[int, int]]:
        if inside:
            return self._skipped(begin, end)
        cursor, known = begin, len(self.calls)
        if self.reader.bare is not None and begin != self._last:
            mark = self.reader.bare.match(self.text, begin)
            if mark is not None and mark.end() <= end:
                self.bare.add(mark.start())
                cursor = self._read(mark)
        while not self.stopped and (mark := self._next(cursor)) is not None and mark.start() < end:
            quoted = is_quoted(self.text, *mark.span())
            cursor = mark.end() if quoted else self._read(mark)
        self._last = max(begin, self.calls[-1].end) if len(self.calls) > known else begin
        return [(call.start, call.end) for call in self.calls[known:]]

    def _skipped(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the places of the calls in a part of reasoning."""
        cursor, spans = begin, []
        while self.reader.exact and self._failures_inside < MOST_UNREADABLE:
            mark = self._next(cursor)
            if mark is None or mark.start() >= end:
                break
            cursor = mark.end()
            if not is_quoted(self.text, *mark.span()):
                try:
                    found, cursor = self.reader.at(self.text, mark, self.tools)
                    spans += [(mark.start(), cursor)] if found else []
                except Unreadable:
                    self._failures_inside += 1
        return spans

    def _next(self, cursor: int) -> re.Match[str] | None:
        """Return the first mark at a position or behind it. Positions of successive calls must not fall."""
        if self._mark is not None and self._mark.start() < cursor:
            self._mark = self._mark.re.search(self.text, cursor)
        return self._mark

    def _read(self, mark: re.Match[str]) -> int:
        try:
            found, end = self.reader.at(self.text, mark, self.tools)
        except Unreadable as error:
            why, end = self._unreadable(error, mark)
            found = [Found(mark.start(), end, "", None, why)]
            self._failures += 1
            if self._failures >= MOST_UNREADABLE:
                why = f"{MOST_UNREADABLE} calls cannot be read: the text behind them is not read"
                self.stopped = [Found(end, end, "", None, why)]
        self.calls += found
        return max(end, mark.end())

    def _unreadable(self, error: Unreadable, mark: re.Match[str]) -> tuple[str, int]:
        """Return the reason why a call cannot be read, and its end.

        The call ends behind its closing mark, unless another call begins before that.
        """
        closes, seen = self.reader.closes, max(error.seen, mark.end())
        if error.end is not None:
            is_cut = closes and error.end == len(self.text) and not self.text.rstrip().endswith(closes)
            return self.reader.unclosed if is_cut else str(error), error.end
        if not closes:
            return str(error), seen
        close = self.text.find(closes, seen)
        if close < 0 or ((after := self._next(seen)) is not None and after.start() < close):
            return self.reader.unclosed, seen
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
        raise Unreadable(f"a call is not a JSON object: it begins with {text[start : start + 20]!r}")
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
    """Return the end of brackets in Python's notation; None if they are not closed within `MOST_LITERAL` characters."""
    depth = 0
    for token in _PYTHON.finditer(text, start, start + MOST_LITERAL):
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
        value = read if not value[end:].strip() else value
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping):
        raise Unreadable("arguments must be an object: name and value of each")
    return dict(value)


def as_call(value: Any, start: int, end: int) -> Found:
    """Return a call that was written as an object. OpenAI's form, with the call under `function`, is one too."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"].strip():
        return Found(start, end, "", None, "a call has no name")
    written = value.get("arguments")
    try:
        arguments = as_arguments(value.get("parameters") if written is None else written)
    except Unreadable as error:
        return Found(start, end, "", None, str(error))
    return Found(start, end, value["name"].strip(), arguments)


class JsonReader(CallReader):
    """JSON between two marks: an object or a list of them.

    Args:
        opening: the mark in front. Repeated marks are one.
        closing: the mark behind; empty if the JSON's end is the call's.
        if_list: read a mark as text unless a list follows.
    """

    def __init__(self, opening: str, closing: str = "", if_list: bool = False) -> None:
        self.opens = re.compile(rf"(?:{re.escape(opening)}\s*)++" + (r"(?=\[)" if if_list else ""))
        self.closes = closing

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[Found], int]:
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


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """Return the text between the first pair of tags; None if there is none.

    Args:
        text: a response.
        preferred_tags: names of tags, the first one that occurs counts; `tool_call` by default.
    """
    for tag in preferred_tags or ("tool_call",):
        reader = JsonReader(f"<{tag}>", f"</{tag}>")
        for call in reader.read(text):
            inside = text[call.start : call.end]
            if inside.endswith(reader.closes) and reader.opens is not None and (mark := reader.opens.match(inside)):
                return inside[mark.end() : -len(reader.closes)].strip()
    return None


def parse_tool_call(
    response: str, available_tools: Iterable[dict[str, Any]] | None = None, preferred_tags: Sequence[str] | None = None
) -> tuple[str, dict[str, Any], bool]:
    """Return the first call: name of the tool, its arguments, and True if something is wrong.

    Args:
        response: the model's text.
        available_tools: as in a chat request. The name must be among them.
        preferred_tags: see `extract_tool_call`.

    Returns:
        The name is `-ERROR-` if something is wrong.
    """
    calls: list[Found] = []
    for tag in preferred_tags or ("tool_call",):
        calls = calls or JsonReader(f"<{tag}>", f"</{tag}>").read(response)
    if not calls or calls[0].arguments is None:
        if calls:
            logger.warning("a tool call cannot be read: %s", calls[0].problem)
        return NO_TOOL, {}, True
    name, arguments = calls[0].name, calls[0].arguments
    if available_tools:
        known = {tool.get("name") or tool.get("function", {}).get("name") for tool in available_tools}
        if name not in known:
            return NO_TOOL, arguments, True
    return name, arguments, False
