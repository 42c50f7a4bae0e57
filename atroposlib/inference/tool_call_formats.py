"""The notations in which models write calls of tools, by the names of vLLM's parsers. Pure.

Sources: the models' own chat templates and the documentation of vLLM's `--tool-call-parser`.
`atroposlib.utils.tool_call_parser` scans the text; this module knows the notations.
"""

from __future__ import annotations

import ast
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atroposlib.utils.tool_call_parser import (
    CallReader,
    Found,
    JsonReader,
    Tools,
    Unreadable,
    as_call,
    decode,
    literal_end,
    skip_space,
)


class CallFormat(CallReader):
    """One notation of calls, to read and to write."""

    @abstractmethod
    def write(self, name: str, arguments: Any) -> str:
        """Return a call as the model would write it."""

    def write_all(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Return several calls of one answer, each given as a name and its arguments."""
        return "\n".join(self.write(name, arguments) for name, arguments in calls)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def by_name(arguments: Any) -> Mapping[str, Any]:
    """Return arguments by name. Text that is not JSON becomes one argument of the name `arguments`."""
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


class JsonBetween(JsonReader, CallFormat):
    """JSON between two marks, an object for each call or a list of them.

    Args:
        opening: the mark in front.
        closing: the mark behind; empty if the JSON's end is the call's.
        many: write a list.
        arguments: name of the arguments' field in a call that is written. Both names are read.
        if_list: read a mark as text unless a list follows.
    """

    def __init__(
        self, opening: str, closing: str = "", many: bool = False, arguments: str = "arguments", if_list: bool = False
    ) -> None:
        super().__init__(opening, closing, if_list)
        self.opening, self.many, self.arguments = opening, many, arguments

    def write(self, name: str, arguments: Any) -> str:
        call = {"name": name, self.arguments: arguments}
        between = f"\n{compact(call)}\n" if self.closes and not self.many else compact([call] if self.many else call)
        return f"{self.opening}{between}{self.closes}"


class BareJson(CallFormat):
    """Llama's notation: the answer begins with a JSON object, or has one behind `<|python_tag|>`.

    Several calls have `;` or white space between them. An object without a name, arguments and
    parameters is an answer in JSON rather than a call.
    """

    between = re.compile(r"[;\s]*(?=\{)")

    opens = re.compile(r"<\|python_tag\|>\s*")
    bare = re.compile(r"\s*(?=\{\s*[\"'}])")

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[Found], int]:
        value, end = decode(text, mark.end())
        if not mark[0].strip() and not ("name" in value or "arguments" in value or "parameters" in value):
            return [], mark.end()
        found = [as_call(value, mark.start(), end)]
        while (more := self.between.match(text, end)) is not None:
            try:
                value, end = decode(text, more.end())
            except Unreadable as error:
                return [*found, Found(mark.start(), end, "", None, str(error))], len(text)
            found.append(as_call(value, mark.start(), end))
        return found, end

    def write(self, name: str, arguments: Any) -> str:
        return compact({"name": name, "parameters": arguments})


class MistralJson(JsonBetween):
    """`[TOOL_CALLS]` and a list, or since 2025 `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    named = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[Found], int]:
        named = self.named.match(text, mark.end())
        if named is None:
            return super().at(text, mark, tools)
        arguments, end = decode(text, named.end())
        return [Found(mark.start(), end, named[1], arguments)], end


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

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[Found], int]:
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
            calls = ast.parse(written, mode="eval").body.elts  # type: ignore[attr-defined]
            found = [Found(mark.start(), end, ast.unparse(call.func), plain_arguments(call)) for call in calls]
        except (SyntaxError, ValueError, TypeError, AttributeError, MemoryError, RecursionError) as error:
            raise Unreadable(f"a call is not as Python writes it: {error}") from None
        return found, end

    def write(self, name: str, arguments: Any) -> str:
        return self.write_all([(name, arguments)])

    def write_all(self, calls: Iterable[tuple[str, Any]]) -> str:
        written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in by_name(given).items())})" for name, given in calls)
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
        head: pattern of all that stands before the arguments, the mark included, with the group `name`.
        tail: pattern of the end.
        closing: the mark at the end, as text.
        call: text of a call, with {name} and {body}.
        pair: pattern of an argument, with the groups `key` and `value`; None if the arguments are JSON.
        argument: text of an argument, with {key} and {value}.
    """

    def __init__(
        self, opening: str, head: str, tail: str, closing: str, call: str, pair: str | None = None, argument: str = ""
    ) -> None:
        self.opens = re.compile(opening)
        self.closes = closing
        self.exact = pair is None
        self._head, self._tail = re.compile(head), re.compile(tail)
        self._pair = None if pair is None else re.compile(pair, re.DOTALL)
        self._call, self._argument = call, argument

    def at(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[Found], int]:
        head = self._head.match(text, mark.start())
        if head is None:
            raise Unreadable("a call has no name, or is not in the format of the tools")
        name = head["name"].strip()
        arguments, at = self._arguments(text, head.end(), tools, name)
        tail = self._tail.match(text, at)
        if tail is None:
            rest = text[at : at + 20]
            raise Unreadable(f"{rest!r} follows the arguments of {name!r:.50}: write {self.closes} behind them")
        return [Found(mark.start(), tail.end(), name, arguments)], tail.end()

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

    def write(self, name: str, arguments: Any) -> str:
        if self._pair is None:
            return self._call.format(name=name, body=compact(arguments))
        written = (
            self._argument.format(key=key, value=value if isinstance(value, str) else compact(value))
            for key, value in by_name(arguments).items()
        )
        return self._call.format(name=name, body="".join(written))


def types_of(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """Return the JSON types of each parameter of a tool; empty if its schema is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: json_types(schema) for key, schema in properties.items() if isinstance(schema, Mapping)}
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
        The text itself, if a string is allowed and the text is not of another allowed type, or if it is
        not JSON. The tool refuses what does not fit.
    """
    value = text.removeprefix("\n").removesuffix("\n")
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = {"True": True, "False": False, "None": None}.get(value, value)
    return value if "string" in types and not types & JSON_TYPES.get(type(read), frozenset()) else read


JSON_TYPES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def xml(tag: str) -> Marked:
    """Return the notation of Qwen's coders. `tag` stands around each call, and may be missing in front."""
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
    **dict.fromkeys(("jamba", "hunyuan_a13b"), JsonBetween("<tool_calls>", "</tool_calls>", many=True)),
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


def content_before(text: str, calls: Sequence[Found]) -> str | None:
    """Return the text before the first call, without the marks that open a section of calls."""
    before = text[: calls[0].start]
    for mark in SECTION_MARKS:
        before = before.replace(mark, "")
    return before.strip() or None
