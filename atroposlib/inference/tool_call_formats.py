"""How models write calls of tools: one format for each family, by the name of vLLM's parser for it. Pure.

Sources: the models' own chat templates and the documentation of vLLM's `--tool-call-parser`.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.utils.tool_call_parser import read_object

Tools = Sequence[Mapping[str, Any]]


class Unreadable(ValueError):
    """A text that begins a call and does not hold one."""


@dataclass(frozen=True)
class Found:
    """A call in a text.

    Attributes:
        start, end: where it stands.
        name: of the function.
        arguments: by name.
    """

    start: int
    end: int
    name: str
    arguments: Any


class CallFormat(ABC):
    """One way of writing calls."""

    @abstractmethod
    def read(self, text: str, tools: Tools = ()) -> list[Found]:
        """The calls in a text, in their order; none where it has none.

        Args:
            text: what the model wrote.
            tools: in OpenAI's form; formats that write values as plain text take the values' types from them.

        Raises:
            Unreadable: a call is begun that cannot be read.
        """

    @abstractmethod
    def write(self, name: str, arguments: Any) -> str:
        """A call as the model would write it."""

    def write_all(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Several calls of one answer, each a name and its arguments."""
        return "\n".join(self.write(name, arguments) for name, arguments in calls)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_call(value: Any, start: int, end: int) -> Found:
    """A call given as a JSON object.

    Raises:
        Unreadable: it names no function.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise Unreadable(f"{value!r:.200} names no function")
    return Found(start, end, value["name"], value.get("arguments", value.get("parameters", {})))


@dataclass(frozen=True)
class JsonBetween(CallFormat):
    """JSON between two marks: an object for each call, or with `many` a list of them. Without `close`, up to the text's end."""

    open: str
    close: str = ""
    many: bool = False
    arguments: str = "arguments"

    def read(self, text: str, tools: Tools = ()) -> list[Found]:
        ends = re.escape(self.close) if self.close else rf"(?={re.escape(self.open)})|\Z"
        found = []
        for match in re.finditer(rf"{re.escape(self.open)}\s*(.*?)\s*(?:{ends})", text, re.DOTALL):
            value = list_of(match[1]) if self.many else read_object(match[1])
            if value is None:
                raise Unreadable(f"{match[1]!r:.200} is no JSON")
            found += [as_call(entry, *match.span()) for entry in (value if isinstance(value, list) else [value])]
        return found

    def write(self, name: str, arguments: Any) -> str:
        call = {"name": name, self.arguments: arguments}
        between = f"\n{compact(call)}\n" if self.close and not self.many else compact([call] if self.many else call)
        return f"{self.open}{between}{self.close}"


def list_of(text: str) -> list[Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) else [value]


class BareJson(CallFormat):
    """Llama's: the whole answer is a JSON object, or several with `;` between them, after `<|python_tag|>` or nothing."""

    def read(self, text: str, tools: Tools = ()) -> list[Found]:
        start = text.find("<|python_tag|>")
        rest = text[start + len("<|python_tag|>") :] if start >= 0 else text
        start = max(start, 0)
        if not rest.lstrip().startswith("{"):
            return []
        decoder, at, found = json.JSONDecoder(), 0, []
        while at < len(rest.rstrip()):
            at += len(rest[at:]) - len(rest[at:].lstrip("; \n\t"))
            try:
                value, at = decoder.raw_decode(rest, at)
            except ValueError as error:
                raise Unreadable(str(error)) from error
            found.append(as_call(value, start, len(text)))
        return found

    def write(self, name: str, arguments: Any) -> str:
        return compact({"name": name, "parameters": arguments})


@dataclass(frozen=True)
class MistralJson(JsonBetween):
    """`[TOOL_CALLS]` and a list, or since 2025 `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    def read(self, text: str, tools: Tools = ()) -> list[Found]:
        named = list(
            re.finditer(r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*?\})\s*(?=\[TOOL_CALLS\]|\Z)", text, re.DOTALL)
        )
        if not named:
            return super().read(text, tools)
        found = []
        for match in named:
            arguments = read_object(match[2])
            if arguments is None:
                raise Unreadable(f"{match[2]!r:.200} is no JSON")
            found.append(Found(*match.span(), match[1], arguments))
        return found


@dataclass(frozen=True)
class Pythonic(CallFormat):
    """A list of calls as Python writes them, `[weather(city="Rome"), stop()]`, between marks where the model has some."""

    open: str = ""
    close: str = ""

    def read(self, text: str, tools: Tools = ()) -> list[Found]:
        start = text.find(self.open)
        if start < 0:
            return []
        end = text.find(self.close, start) if self.close else len(text)
        inside = text[start + len(self.open) : end if end >= 0 else len(text)].strip()
        if not inside.startswith("["):
            return []
        try:
            (statement,) = ast.parse(inside).body
            calls = statement.value.elts  # type: ignore[attr-defined]
            return [Found(start, len(text), ast.unparse(call.func), plain_arguments(call)) for call in calls]
        except (SyntaxError, ValueError, AttributeError) as error:
            raise Unreadable(f"{inside!r:.200}: {error}") from error

    def write(self, name: str, arguments: Any) -> str:
        return self.write_all([(name, arguments)])

    def write_all(self, calls: Iterable[tuple[str, Any]]) -> str:
        told = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return f"{self.open}[{', '.join(told)}]{self.close}"


def plain_arguments(call: ast.Call) -> dict[str, Any]:
    """The keywords of a call, whose values are literals.

    Raises:
        ValueError: one is no literal, or is given without its name.
    """
    if call.args:
        raise ValueError("an argument without a name")
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


@dataclass(frozen=True)
class Marked(CallFormat):
    """Name and arguments between marks of their own.

    Attributes:
        pattern: of a call, with the groups `name` and `body`.
        parameters: of an argument in the body, with `key` and `value`; None where the body is JSON.
        call, argument: the text of a call with {name} and {body}, and of an argument with {key} and {value}.
        begins: text that a call begins with: where it stands and the pattern does not match, the call cannot be read.
    """

    pattern: str
    call: str
    begins: str
    parameters: str | None = None
    argument: str = ""

    def read(self, text: str, tools: Tools = ()) -> list[Found]:
        found = []
        for match in re.finditer(self.pattern, text, re.DOTALL):
            name, body = match["name"].strip(), match["body"]
            arguments: Any
            if self.parameters is None:
                arguments = read_object(body.strip()) if body.strip() else {}
                if arguments is None:
                    raise Unreadable(f"{body!r:.200} is no JSON")
            else:
                pairs = re.finditer(self.parameters, body, re.DOTALL)
                types = types_of(tools, name)
                arguments = {pair["key"].strip(): typed(pair["value"], types.get(pair["key"].strip())) for pair in pairs}
            found.append(Found(*match.span(), name, arguments))
        if not found and self.begins in text:
            raise Unreadable(f"{text[text.index(self.begins) :]!r:.200} is half a call")
        return found

    def write(self, name: str, arguments: Any) -> str:
        if self.parameters is None:
            return self.call.format(name=name, body=compact(arguments))
        told = (self.argument.format(key=k, value=v if isinstance(v, str) else compact(v)) for k, v in arguments.items())
        return self.call.format(name=name, body="".join(told))


def types_of(tools: Tools, name: str) -> dict[str, Any]:
    """Parameter -> type, as a tool's JSON schema has them; empty where it is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def typed(text: str, kind: str | None) -> Any:
    """A value that was written as plain text. What does not fit its type stays text, for the tool to refuse."""
    value = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


XML = {
    "pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>(?P<body>.*?)(?:</function>\s*)?</tool_call>",
    "parameters": r"<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>",
    "call": "<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>",
    "argument": "<parameter={key}>\n{value}\n</parameter>\n",
}
HERMES = JsonBetween("<tool_call>", "</tool_call>")
QWEN_CODER = Marked(**XML, begins="<function=")
GLM = Marked(
    pattern=r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?P<body>(?:<arg_key>.*?</arg_value>\s*)*)</tool_call>",
    parameters=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    call="<tool_call>{name}\n{body}</tool_call>",
    argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    begins="<tool_call>",
)

FORMATS: dict[str, CallFormat] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3", "qwen3_json", "granite4"), HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), QWEN_CODER),
    "seed_oss": Marked(
        **{key: text.replace("tool_call>", "seed:tool_call>") for key, text in XML.items()}, begins="<seed:tool"
    ),
    **dict.fromkeys(("llama3_json", "llama4_json"), BareJson()),
    "mistral": MistralJson("[TOOL_CALLS]", many=True),
    **dict.fromkeys(("jamba", "hunyuan_a13b"), JsonBetween("<tool_calls>", "</tool_calls>", many=True)),
    "granite": JsonBetween("<|tool_call|>", many=True),
    "granite-20b-fc": JsonBetween("<function_call>"),
    "internlm": JsonBetween("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters"),
    "phi4_mini_json": JsonBetween("functools", many=True),
    "longcat": JsonBetween("<longcat_tool_call>", "</longcat_tool_call>"),
    "pythonic": Pythonic(),
    "llama4_pythonic": Pythonic("<|python_start|>", "<|python_end|>"),
    "olmo3": Pythonic("<function_calls>", "</function_calls>"),
    "lfm2": Pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek_v3": Marked(
        pattern=r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<body>.*?)\n```<｜tool▁call▁end｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜>",
        begins="<｜tool▁call▁begin｜>",
    ),
    "deepseek_v31": Marked(
        pattern=r"<｜tool▁call▁begin｜>(?P<name>.*?)<｜tool▁sep｜>(?P<body>.*?)<｜tool▁call▁end｜>",
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{body}<｜tool▁call▁end｜>",
        begins="<｜tool▁call▁begin｜>",
    ),
    "kimi_k2": Marked(
        pattern=r"<\|tool_call_begin\|>\s*functions\.(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>(?P<body>.*?)<\|tool_call_end\|>",
        call="<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{body}<|tool_call_end|>",
        begins="<|tool_call_begin|>",
    ),
    **dict.fromkeys(("glm45", "glm47"), GLM),
    "minimax_m2": Marked(
        pattern=r"<invoke name=\"?(?P<name>[^\">]+)\"?>(?P<body>.*?)</invoke>",
        parameters=r"<parameter name=\"?(?P<key>[^\">]+)\"?>(?P<value>.*?)</parameter>",
        call='<minimax:tool_call>\n<invoke name="{name}">\n{body}</invoke>\n</minimax:tool_call>',
        argument='<parameter name="{key}">{value}</parameter>\n',
        begins="<invoke",
    ),
}
"""By the names of vLLM's parsers."""


SECTION_MARKS = ("<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<minimax:tool_call>")
"""What stands around all calls of an answer, where a format has that."""


def content_before(text: str, calls: Sequence[Found]) -> str | None:
    """What a model said before its first call, without the marks that open a section of calls."""
    before = text[: calls[0].start]
    for mark in SECTION_MARKS:
        before = before.replace(mark, "")
    return before.strip() or None
