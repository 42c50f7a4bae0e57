"""The text in which a model calls tools and gets their answers. Pure."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from atroposlib.errors import UsageError
from atroposlib.inference.tool_call_formats import FORMATS
from atroposlib.utils.tool_call_parser import CallReader, Found, Tools, Unreadable

Problem = Literal["unreadable", "unknown_tool", "wrong_arguments", "too_many", "raised", "timeout", "not_text", "cut"]
MOST_OF_REASON = 200
"""Characters of the reason why a call cannot be read."""


class Described(Protocol):
    """The part of a tool that a format uses.

    Attributes:
        schema: as in a chat request: `{"type": "function", "function": {name, description, parameters}}`.
    """

    schema: dict[str, Any]


@dataclass
class Call:
    """A call that the model wrote.

    Attributes:
        name: of the tool; empty where it cannot be read.
        arguments: as the model wrote them, by name.
        problem: the kind of fault; None if there was none. After "cut" the answer is there, but for its end.
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
        in_template: the model's chat template shows it the tools, if it can; `describe` is for templates that cannot.
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
            text: the response with its reasoning. If the prompt opened the reasoning, the opening tag stands in front.

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
    """The notation of a family of models, by the name of vLLM's parser for it, such as `llama3_json` or `mistral`.

    A call inside of reasoning does not count; see docs/multi-turn.md.

    Args:
        name: one of `atroposlib.inference.tool_call_formats.FORMATS`.
        role: see `ToolFormat`.

    Raises:
        UsageError: there is none of that name.
    """

    in_template = True

    def __init__(self, name: str, role: str = "tool"):
        super().__init__(role)
        if name not in FORMATS:
            raise UsageError(f"no tool format is called {name!r}: choose one of {', '.join(FORMATS)}")
        self._format = FORMATS[name]

    def describe(self, tools: Sequence[Described]) -> str:
        """Return one line of JSON for each tool, and a call as the model would write it."""
        lines = "\n".join(json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools)
        example = self._format.write("name", {"argument": "value"})
        return f"You can call these tools:\n{lines}\n\nA call looks like this; the next message has its answer:\n{example}"

    def read(self, text: str) -> list[Call]:
        return self.read_with(text, ())

    def read_with(self, text: str, tools: Sequence[Described]) -> list[Call]:
        """As `read`, with the tools whose schemas have the types of plain values."""
        return list(map(as_read, self._format.read(text, [tool.schema for tool in tools])))


class HermesFormat(NamedFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, on which Hermes and Qwen models are trained."""

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

    def __init__(self, tool: str, argument: str, begin: str, end: str, role: str = "tool", hint: str = ""):
        super().__init__(role)
        self.tool, self.argument, self.begin, self.end, self.hint = tool, argument, begin, end, hint
        self._reader = _TextBetween(tool, argument, begin, end)

    def describe(self, tools: Sequence[Described]) -> str:
        return self.hint

    def read(self, text: str) -> list[Call]:
        return list(map(as_read, self._reader.read(text)))


class _TextBetween(CallReader):
    """The reader of `TaggedFormat`."""

    exact = False

    def __init__(self, tool: str, argument: str, begin: str, end: str):
        self.opens = re.compile(re.escape(begin))
        self.closes = end
        self._tool, self._argument, self._begin = tool, argument, begin

    @property
    def unclosed(self) -> str:
        return f"{self.closes!r} is missing"

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[Found], int]:
        close = text.find(self.closes, mark.end())
        if close < 0 or text.find(self._begin, mark.end(), close) >= 0:
            raise Unreadable(self.unclosed)
        end = close + len(self.closes)
        return [Found(mark.start(), end, self._tool, {self._argument: text[mark.end() : close].strip()})], end


def as_read(found: Found) -> Call:
    """Return a call of the reader as one to answer."""
    span = (found.start, found.end)
    if found.arguments is None:
        return Call("", None, "unreadable", f"error: {found.problem[:MOST_OF_REASON]}", span)
    return Call(found.name, found.arguments, span=span)
