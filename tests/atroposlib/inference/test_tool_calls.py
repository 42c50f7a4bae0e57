"""A format reads its own text again, whatever the arguments; real models' text is read; half a call
does not count.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.inference.responses import FORMATS, ToolCall, ToolCallTranslator, content_before

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    }
]
WORDS = st.text("abc 123äñ'.,:?!", min_size=1, max_size=12).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", {format: name for name, format in FORMATS.items()}.values())
@settings(max_examples=15)
@given(
    calls=st.lists(
        st.fixed_dictionaries({"word": WORDS, "count": st.integers(-99, 99)}),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read_again(name: str, calls: list[dict[str, Any]]) -> None:
    text = FORMATS[name].render_all(("look_up", arguments) for arguments in calls)
    found = FORMATS[name].parse(
        f"Let me see.\n{text}" if name not in ("llama3_json", "llama4_json", "pythonic") else text,
        TOOLS,
    )
    assert [(call.name, call.arguments) for call in found] == [
        ("look_up", arguments) for arguments in calls
    ]


X, Y = '{"word": "x"}', '{"word": "y"}'
WRITTEN = {
    "llama3_json": f'<|python_tag|>{{"name": "look_up", "parameters": {X}}}; {{"name": "look_up", "parameters": {Y}}}',
    "mistral": f"[TOOL_CALLS]look_up[ARGS]{X}[TOOL_CALLS]look_up{Y}",
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=word>\nx\n</parameter>\n</function>\n</tool_call>"
    "<tool_call><function=look_up><parameter=word>y</parameter></function></tool_call>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{X}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{Y}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{X}"
    f"<|tool_call_end|><|tool_call_begin|>functions.look_up:1<|tool_call_argument_begin|>{Y}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "look_up", "arguments": {X}}}, {{"name": "look_up", "arguments": {Y}}}]',
    "llama4_pythonic": '<|python_start|>[look_up(word="x"), look_up(word="y")]<|python_end|>',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_models_write_is_read(name: str) -> None:
    calls = FORMATS[name].parse(WRITTEN[name], TOOLS)
    assert [(call.name, call.arguments) for call in calls] == [
        ("look_up", {"word": "x"}),
        ("look_up", {"word": "y"}),
    ]
    assert content_before(WRITTEN[name], calls) is None


HALF = {
    "hermes": "<tool_call>no json</tool_call>",
    "jamba": '<tool_calls>["look_up"]</tool_calls>',
    "llama3_json": '{"name": "look_up"',
    "mistral": "[TOOL_CALLS]{",
    "pythonic": "[look_up(word=other())]",
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=word>",
    "glm45": "<tool_call>look_up\n<arg_key>word",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up",
}


@pytest.mark.parametrize("name", HALF)
def test_half_a_call_stays_text(name: str) -> None:
    (call,) = FORMATS[name].parse(HALF[name], TOOLS)
    assert (call.name, call.arguments) == ("", None)
    assert call.problem
    assert ToolCallTranslator(None, name).parse_model_output(HALF[name], tools=TOOLS) == (
        HALF[name],
        None,
        "stop",
    )


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_has_none(name: str) -> None:
    assert FORMATS[name].parse("It is four: {x | x = 4} [1, 2] in all.", TOOLS) == []


def test_a_call_is_a_table_and_an_object() -> None:
    """Environments written for Atropos index it, and code for OpenAI's client reads attributes."""
    translator = ToolCallTranslator(None)
    raw = 'Hm.\n\n<tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call>'
    content, calls, reason = translator.parse_model_output(raw, tools=TOOLS)
    assert (content, reason) == ("Hm.", "tool_calls")
    assert calls is not None
    (call,) = calls
    assert call["function"]["name"] == call.function.name == "look_up"
    assert json.loads(json.dumps(call))["id"] == call.id
    assert isinstance(call, ToolCall)
    with pytest.raises(AttributeError, match="has no 'index'"):
        _ = call.index
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [json.loads(json.dumps(call))]}
    assert translator.convert_messages_for_template([said])[0]["content"] == raw, (
        "as it was sampled, to the last space"
    )
    changed = translator.convert_messages_for_template([said | {"content": "Oh."}])[0]["content"]
    assert (
        changed == 'Oh.\n<tool_call>\n{"name": "look_up", "arguments": {"word": "x"}}\n</tool_call>'
    )
