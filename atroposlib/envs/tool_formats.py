"""The text in which a model calls tools and gets their answers. Pure."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from atroposlib.errors import UsageError
from atroposlib.inference.tool_call_formats import FORMATS, Unreadable
from atroposlib.utils.tool_call_parser import read_object

Problem = Literal["unreadable", "unknown_tool", "wrong_arguments", "too_many", "raised", "timeout", "not_text", "cut"]
MOST_OF_REASON = 200
"""Characters of why a call cannot be read."""
CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class Described(Protocol):
    """What a format has to know of a tool.

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
        problem: what went wrong; None if nothing did. After "cut" the answer is there, but for its end.
        answer: what the model is told.
    """

    name: str
    arguments: dict[str, Any] | None = None
    problem: Problem | None = None
    answer: str = ""


class ToolFormat(ABC):
    """How the model is told of tools, writes calls and gets answers.

    Attributes:
        in_template: the model's chat template tells it of tools, if it knows any; `describe` is for those that do not.
        role: of the message that answers a call. Templates that know no "tool" take "user".
    """

    in_template = False

    def __init__(self, role: str = "tool"):
        self.role = role

    def describe(self, tools: Sequence[Described]) -> str:
        """What the system message says of them; empty for nothing."""
        return ""

    @abstractmethod
    def read(self, text: str) -> list[Call]:
        """The calls of an answer, in their order. One that cannot be read has the problem, and why as its answer."""

    def answer(self, call: Call) -> dict[str, Any]:
        """The message that answers a call."""
        return {"role": self.role, "content": call.answer}


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, on which Hermes and Qwen models are trained.

    What stands in a `<think>` block is no call.
    """

    in_template = True

    def describe(self, tools: Sequence[Described]) -> str:
        """One line of JSON for each tool, and how to call one."""
        lines = "\n".join(json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You can call these tools:\n{lines}\n\nA call is a JSON object between tags; the next message has its answer:\n"
            '<tool_call>\n{"name": "the tool\'s name", "arguments": {"argument": "value"}}\n</tool_call>'
        )

    def read(self, text: str) -> list[Call]:
        spoken = text.rpartition("</think>")[2].partition("<think>")[0]
        return [
            self._call(found[1], found[2]) for found in re.finditer(r"<tool_call>(.*?)(</tool_call>|\Z)", spoken, re.DOTALL)
        ]

    @staticmethod
    def _call(text: str, end: str) -> Call:
        if not end:
            return unreadable("a call that does not end with </tool_call>")
        try:
            call = read_object(text.strip())
            arguments: Any = (call or {}).get("arguments", {})
            if isinstance(arguments, str):
                arguments = read_object(arguments)
        except RecursionError:
            call = None
        if call is None:
            return unreadable("what stands between the tags is no JSON object")
        if not isinstance(call.get("name"), str):
            return unreadable("a call has no name")
        if not isinstance(arguments, dict):
            return unreadable("arguments must be an object: name and value of each")
        return Call(call["name"], arguments)

    def answer(self, call: Call) -> dict[str, Any]:
        """As OpenAI has it, or between tags in a user's message."""
        if self.role == "tool":
            return {"role": "tool", "name": call.name, "content": call.answer}
        return {"role": self.role, "content": f"<tool_response>\n{call.answer}\n</tool_response>"}


class NamedFormat(ToolFormat):
    """The format of another family of models, by the name of vLLM's parser for it, such as `llama3_json` or `mistral`.

    An answer of which one call cannot be read is answered as one unreadable call.

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
        """One line of JSON for each tool, and a call as the model would write it."""
        lines = "\n".join(json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools)
        example = self._format.write("name", {"argument": "value"})
        return f"You can call these tools:\n{lines}\n\nA call looks like this; the next message has its answer:\n{example}"

    def read(self, text: str) -> list[Call]:
        try:
            found = self._format.read(text)
        except (Unreadable, RecursionError, MemoryError) as error:
            return [unreadable(str(error)[:MOST_OF_REASON])]
        return [
            Call(call.name, call.arguments) if isinstance(call.arguments, dict) else unreadable("arguments must be an object")
            for call in found
        ]


class TaggedFormat(ToolFormat):
    """One tool with one argument, as plain text between two marks: a few tokens, for small models.

    Args:
        tool: its name.
        argument: its parameter.
        begin: before the argument.
        end: after it.
        hint: what the system message says; empty for a model that knows.
    """

    def __init__(self, tool: str, argument: str, begin: str, end: str, role: str = "tool", hint: str = ""):
        super().__init__(role)
        self.tool, self.argument, self.begin, self.end, self.hint = tool, argument, begin, end, hint

    def describe(self, tools: Sequence[Described]) -> str:
        return self.hint

    def read(self, text: str) -> list[Call]:
        calls = []
        _, *rest = text.split(self.begin)
        for part in rest:
            written, end, _ = part.partition(self.end)
            calls.append(Call(self.tool, {self.argument: written.strip()}) if end else unreadable(f"{self.end!r} is missing"))
        return calls


def unreadable(why: str) -> Call:
    """A call of which nothing is known but what is wrong with it."""
    return Call("", None, "unreadable", f"error: {why}")
