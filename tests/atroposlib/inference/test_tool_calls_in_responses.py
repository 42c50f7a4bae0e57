"""Calls of tools in made-up responses: prose, reasoning and calls in every order, with tags
anywhere.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atroposlib.inference.responses import (
    FORMATS,
    MAX_UNREADABLE,
    HermesFormat,
    NamedFormat,
    TaggedFormat,
    ToolCallTranslator,
    opened_by,
    parse_tool_call,
    whole_response,
)

MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<function=x>",
    "</parameter>",
    "[TOOL_CALLS]",
    "<|end|>",
]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("w", "v", "bad")
]
MENTIONS = [*MARKS, '"', "'", "\\", "{", "}", "]", "\n", "```", "a", " ", "ü", "\u2028"]
STRINGS = st.lists(st.sampled_from(MENTIONS), max_size=8).map("".join)
VALUES = st.recursive(
    STRINGS | st.integers(-9, 9) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(STRINGS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(STRINGS, VALUES, max_size=2)
CALLS = st.tuples(st.sampled_from(["w", "v"]), ARGUMENTS)
PROSE = st.sampled_from(["", "\n", "So: ", "I write `<tool_call>` first. ", 'The "</think>" tag. '])
JSON_FORMATS = [
    "hermes",
    "jamba",
    "longcat",
    "internlm",
    "mistral",
    "granite",
    "deepseek_v31",
    "kimi_k2",
    "phi4_mini_json",
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@st.composite
def responses(draw: st.DrawFn, name: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return what the prompt opened, a response, and the calls that count."""
    write, text, counted = FORMATS[name].render, "", []
    opened = draw(st.sampled_from(["", "<think>\n"]))
    if opened:
        text = f"hm {draw(PROSE)}{write('bad', draw(ARGUMENTS))} no</think>"
    for kind in draw(st.lists(st.sampled_from(["prose", "call", "reasoning"]), max_size=5)):
        if kind == "prose":
            text += draw(PROSE)
        elif kind == "reasoning":
            text += f"<think>or {write('bad', draw(ARGUMENTS))} <think>?</think>\n"
        else:
            counted.append(draw(CALLS))
            text += write(*counted[-1]) + "\n"
    return opened, text, counted


@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_calls_outside_of_reasoning_count_whatever_their_strings_hold(
    name: str, data: st.DataObject
) -> None:
    opened, text, counted = data.draw(responses(name))
    found = FORMATS[name].parse(text, opened=opened)
    assert [(one.name, one.arguments, one.problem) for one in found] == [
        (*pair, "") for pair in counted
    ]
    assert [
        (one.name, one.arguments) for one in NamedFormat(name).read(whole_response(text, opened))
    ] == counted
    translator = ToolCallTranslator(None, name)
    _, calls, reason = translator.parse_model_output(text, None, TOOLS, opened)
    assert [
        (one.function.name, json.loads(one.function.arguments)) for one in calls or []
    ] == counted
    assert reason == ("tool_calls" if counted else "stop")


@settings(max_examples=60)
@given(pair=CALLS, share=st.floats(0, 1), opened=st.sampled_from(["", "<think>\n"]))
def test_a_call_that_was_cut_off_is_answered_with_the_reason(
    pair: tuple[str, Any], share: float, opened: str
) -> None:
    whole = FORMATS["hermes"].render(*pair)
    begin = len("<tool_call>")
    cut = whole[: begin + round(share * (len(whole) - 1 - begin))]
    assume(
        "</tool_call>" not in cut
    )  # in a string of the arguments it looks like the end of the call
    text = ("hm</think>" if opened else "") + call("w") + cut
    first, half = HermesFormat().read(whole_response(text, opened))
    assert (first.name, half.problem) == ("w", "unreadable")
    assert half.answer == "error: a call that does not end with </tool_call>"


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_reasoning_never_runs(name: str) -> None:
    thought, real = FORMATS[name].render("bad", {"a": "b"}), FORMATS[name].render("w", {"a": "c"})
    for text, opened in [
        (f"<think>{thought}</think>{real}", ""),
        (f"{thought}</think>{real}", "<think>\n"),
        (f"{thought}</think>{real}", ""),
        (f"[THINK]{thought}[/THINK]{real}", ""),
    ]:
        assert [(one.name, one.arguments) for one in FORMATS[name].parse(text, opened=opened)] == [
            ("w", {"a": "c"})
        ]
        assert [one.name for one in NamedFormat(name).read(whole_response(text, opened))] == ["w"]
    for text, opened in [
        (f"<think>{thought}", ""),
        (thought, "<think>\n"),
        (f"<think>{thought}</think>4", ""),
    ]:
        assert FORMATS[name].parse(text, opened=opened) == []
        assert ToolCallTranslator(None, name).parse_model_output(text, None, TOOLS, opened) == (
            text,
            None,
            "stop",
        )


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2", "glm45"])
def test_tags_in_plain_values_are_text(name: str) -> None:
    text = "a </think> <think> </tool_call> <tool_call> b"
    written = f"<think>or not</think>{FORMATS[name].render('w', {'t': text})}<think>y</think>{FORMATS[name].render('v', {})}"
    assert [(one.name, one.arguments) for one in FORMATS[name].parse(written)] == [
        ("w", {"t": text}),
        ("v", {}),
    ]


WRITTEN: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "parameters": (
        '<tool_call>{"name": "w", "parameters": {"t": 1}}</tool_call>',
        [("w", {"t": 1})],
    ),
    "no arguments": ('<tool_call>{"name": "w"}</tool_call>', [("w", {})]),
    "null": ('<tool_call>{"name": "w", "arguments": null}</tool_call>', [("w", {})]),
    "as text": (
        '<tool_call>{"name": "w", "arguments": "{\\"t\\": \\"</tool_call>\\"}"}</tool_call>',
        [("w", {"t": "</tool_call>"})],
    ),
    "as OpenAI": (
        '<tool_call>{"function": {"name": "w", "arguments": "{}"}}</tool_call>',
        [("w", {})],
    ),
    "single quotes": (
        "<tool_call>{'name': 'w', 'arguments': {'t': 'a </tool_call> \"b\"'}}</tool_call>",
        [("w", {"t": 'a </tool_call> "b"'})],
    ),
    "line break in a string": (
        '<tool_call>{"name": "w", "arguments": {"t": "a\nb"}}</tool_call>',
        [("w", {"t": "a\nb"})],
    ),
    "two in one": ('<tool_call>[{"name": "w"}, {"name": "v"}]</tool_call>', [("w", {}), ("v", {})]),
    "opened three times": (f"<tool_call>\n<tool_call> {call('w')}", [("w", {})]),
    "opened, prose, opened": (f"<tool_call> I mean {call('w')}", [("", None), ("w", {})]),
    "a call in reasoning with a tag in a string": (
        f"{call('w')}<think>{call('bad', t='</think>')}</think>{call('v')}",
        [("w", {}), ("v", {})],
    ),
    "half a call in reasoning": ('<think>{"<tool_call>{"name": "</think>' + call("w"), [("w", {})]),
    "a set": ("<tool_call>{'name': 'w', 'arguments': {1, 2}}</tool_call>", [("", None)]),
    "a list for arguments": (
        '<tool_call>{"name": "w", "arguments": [1]}</tool_call>',
        [("", None)],
    ),
    "a number of 5000 digits": (
        f'<tool_call>{{"name": "w", "arguments": {{"n": {"9" * 5000}}}}}</tool_call>',
        [("", None)],
    ),
    "a tag in an unreadable call": (
        call("v") + '<tool_call>{"name": "w", t: "a </think> b"}</tool_call>',
        [("v", {}), ("", None)],
    ),
    "a tag in a call that was cut off": (
        call("v") + '<tool_call>{"name": "w", "t": "a </think> b',
        [("v", {}), ("", None)],
    ),
    "more text in the tags": ('<tool_call>{"name": "w"} please</tool_call>', [("", None)]),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_hermes_calls_in_unusual_forms(case: str) -> None:
    text, expected = WRITTEN[case]
    found = FORMATS["hermes"].parse(text)
    assert [(one.name, one.arguments) for one in found] == expected
    assert all(bool(one.problem) == (one.arguments is None) for one in found)


def test_an_answer_in_json_is_not_a_call_of_llamas_format() -> None:
    read = FORMATS["llama3_json"].parse
    assert read('{"answer": 5}') == []
    assert read('It is {"name": "w"}') == []
    assert [
        (one.name, one.arguments)
        for one in read('{"name": "w", "parameters": {"t": "}; {"}}\n{"name": "v"}')
    ] == [
        ("w", {"t": "}; {"}),
        ("v", {}),
    ]
    first, second = read('{"name": "w"}; {"name": ')
    assert (first.name, bool(second.problem)) == ("w", True)


def test_plain_text_calls_in_reasoning_do_not_count_either() -> None:
    calc = TaggedFormat("calc", "expression", "<calc>", "</calc>")
    text = "1+1? <calc>1+1</calc></think><calc>2</calc><think><calc>3</calc></think><calc>4</calc>"
    assert [one.arguments for one in calc.read(f"<think>\n{text}")] == [
        {"expression": "2"},
        {"expression": "4"},
    ]


PIECES = [
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"a',
    "<tool_call>{'a':",
    '<tool_call>{"":"',
    "<think>",
    "</think>",
    "<think><tool_call>{",
]
PIECES += [
    "<function=",
    "<function=a><parameter=b>",
    "[TOOL_CALLS]a{",
    "<|python_tag|>{",
    "{",
    "[f(",
    "<calc>",
]


@pytest.mark.parametrize("piece", PIECES)
def test_text_of_opening_tags_is_read_in_one_pass(piece: str) -> None:
    """Every tag is looked at once.

    With a pass over the text for each tag, megabytes would take hours.
    """
    text = piece * (250_000 // len(piece))
    for name in (
        "hermes",
        "qwen3_coder",
        "glm45",
        "llama3_json",
        "mistral",
        "pythonic",
        "deepseek_v31",
    ):
        found = FORMATS[name].parse(text)
        assert len(found) <= MAX_UNREADABLE + 1
        assert not any(one.arguments is not None for one in found)
    assert (
        len(TaggedFormat("calc", "expression", "<calc>", "</calc>").read(text))
        <= MAX_UNREADABLE + 1
    )


def test_more_unreadable_calls_than_are_read() -> None:
    found = FORMATS["hermes"].parse("<tool_call>x " * 500 + call("w"))
    assert (
        found[-1].problem
        == f"{MAX_UNREADABLE} calls cannot be read: the text behind them is not read"
    )
    assert len(found) == MAX_UNREADABLE + 1


def test_the_functions_of_atropos_use_the_same_reader() -> None:
    text = "<think>" + call("bad") + "</think>" + call("w", t="</tool_call>")
    assert parse_tool_call(text) == ("w", {"t": "</tool_call>"}, False)
    assert parse_tool_call('<a>{"name": "w"}</a>', preferred_tags=["b", "a"]) == ("w", {}, False)


def test_a_tag_in_an_argument_belongs_to_the_answer() -> None:
    assert opened_by("<think>\n") == "<think>\n"
    spans = [one.span for one in HermesFormat().read(call("w", t="</think>"))]
    assert spans == [(0, len(call("w", t="</think>")))]


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "integer"}, "123", 123),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"]}, "123", 123),
        ({"type": "boolean"}, "True", True),
        ({}, "[1]", [1]),
    ],
)
def test_plain_values_have_the_types_of_the_tool(
    schema: dict[str, Any], text: str, expected: Any
) -> None:
    function = {"name": "w", "parameters": {"type": "object", "properties": {"t": schema}}}
    tool = SimpleNamespace(schema={"type": "function", "function": function})
    (one,) = NamedFormat("qwen3_coder").read_with(
        f"<function=w><parameter=t>{text}</parameter></function>", [tool]
    )
    assert one.arguments == {"t": expected}
