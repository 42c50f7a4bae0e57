"""Messages of other programs: taken in every form that a prompt can hold, or refused by the name of
the field.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from transformers import PreTrainedTokenizerFast

from atroposlib.errors import UsageError
from atroposlib.inference.chat_template import checked_messages
from atroposlib.inference.managed_server import ManagedServer
from atroposlib.inference.proxy import create_app
from atroposlib.inference.responses import FORMATS, ToolCallTranslator
from tests.atroposlib.inference.template_shapes import STARTER, Sampler, Shape

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def asked(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def called(**function: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


REFUSED: dict[str, tuple[Any, str]] = {
    "an image": (
        [asked([{"type": "text", "text": "q"}, IMAGE])],
        "messages[0].content[1] is an image: prompts are text here",
    ),
    "an image without a type": (
        [asked([{"image_url": "x"}])],
        "messages[0].content[0] is an image",
    ),
    "a sound": (
        [asked([{"type": "input_audio", "input_audio": {}}])],
        "messages[0].content[0].type is 'input_audio'",
    ),
    "a part without text": (
        [asked([{"type": "text"}])],
        "messages[0].content[0].text is missing: give text",
    ),
    "a part that is a number": ([asked("q"), asked([1])], "messages[1].content[0] is a number"),
    "a number": ([asked(5)], "messages[0].content is a number: give text"),
    "an object": ([asked({"text": "q"})], "messages[0].content is an object"),
    "no content": (
        [{"role": "user", "text": "q"}],
        "messages[0] has no content, only role, text: give its text as `content`",
    ),
    "no role": ([{"content": "q"}], "messages[0].role is missing"),
    "a role that is a number": ([asked("q") | {"role": 1}], "messages[0].role is a number"),
    "reasoning in a list": (
        [asked("q"), {"role": "assistant", "reasoning_content": []}],
        "messages[1].reasoning_content",
    ),
    "calls in an object": (
        [{"role": "assistant", "tool_calls": {}}],
        "messages[0].tool_calls is an object",
    ),
    "a call that is text": (
        [{"role": "assistant", "tool_calls": ["f"]}],
        "messages[0].tool_calls[0] is text",
    ),
    "a call without a function": (
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        "tool_calls[0].function is missing",
    ),
    "a call without a name": (
        [called(arguments="{}")],
        "messages[0].tool_calls[0].function.name is missing",
    ),
}


@pytest.fixture
def sampler() -> Sampler:
    sampler = Sampler(PreTrainedTokenizerFast.from_pretrained(STARTER))
    sampler.tokenizer.chat_template = Shape("", "as it is").template
    return sampler


def served(sampler: Sampler) -> TestClient:
    manager: Any = SimpleNamespace(servers=[sampler], pick=lambda: sampler)
    return TestClient(create_app(manager, sampler.tokenizer), base_url="http://127.0.0.1")


@pytest.mark.parametrize("case", REFUSED)
def test_a_message_that_no_prompt_can_hold_is_refused_by_its_field(
    sampler: Sampler, case: str
) -> None:
    messages, expected = REFUSED[case]
    with pytest.raises(UsageError) as refused:
        asyncio.run(ManagedServer(sampler, sampler.tokenizer).chat_completion(messages=messages))
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
    with served(sampler) as http:
        session = http.post("/sessions/create", json={}).json()["uuid"]
        for path in ("", "/render"):
            answer = http.post(f"/{session}/v1/chat/completions{path}", json={"messages": messages})
            assert answer.status_code == 400
            assert expected in answer.json()["error"]["message"]


def test_contents_of_all_forms_make_one_prompt(sampler: Sampler) -> None:
    managed = ManagedServer(sampler, sampler.tokenizer)
    plain = [asked("one two"), {"role": "assistant", "content": ""}, asked("")]
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for other in (
        [asked(parts), {"role": "assistant", "content": None}, asked([])],
        [asked(["one ", "two"]), {"role": "assistant"}, asked(None)],
        [asked("one two"), ChatCompletionMessage(role="assistant", content=None), asked("")],
    ):
        assert managed.render(other) == managed.render(plain)
    assert "None" not in managed.render(plain)
    with served(sampler) as http:
        session = http.post("/sessions/create", json={}).json()["uuid"]
        body = {"messages": [asked(parts), {"role": "assistant", "content": None}, asked([])]}
        shown = http.post(f"/{session}/v1/chat/completions/render", json=body).json()
    assert shown["prompt_text"] == managed.render(plain)


def test_a_template_that_shows_parts_alone_gets_parts(sampler: Sampler) -> None:
    sampler.tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
    )
    assert (
        ManagedServer(sampler, sampler.tokenizer).render(
            [asked("one"), asked([{"type": "text", "text": "two"}])]
        )
        == "one|two|"
    )


NOT_JSON = ["", "{", '{"a": ', "rm -rf", "[1]", "5", '"text"', "null", "[" * 5000, "</tool_call>"]


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_of_a_history_may_be_anything(name: str) -> None:
    messages = checked_messages([called(name="f", arguments=arguments) for arguments in NOT_JSON])
    written = ToolCallTranslator(None, name).convert_messages_for_template(messages)
    assert all("f" in message["content"] for message in written)
    assert "rm -rf" in written[NOT_JSON.index("rm -rf")]["content"]


def test_arguments_that_are_not_json_are_shown_to_the_model(sampler: Sampler) -> None:
    for sent in (
        called(name="f", arguments='{"a": '),
        called(name="f", arguments='{"a": ') | {"content": "x"},
    ):
        sampler.next = [([99, 2], "stop")]
        managed = ManagedServer(sampler, sampler.tokenizer)
        answer = {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "no JSON"}],
        }
        asyncio.run(managed.chat_completion(messages=[asked("q"), sent, answer], tools=TOOLS))
        assert json.dumps('{"a": ') in sampler.tokenizer.decode(sampler.prompts[-1])


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"]),
            inner,
        )
    ),
    max_leaves=6,
)


@given(
    messages=ANY
    | st.lists(
        st.fixed_dictionaries({"role": st.just("user"), "content": ANY, "tool_calls": ANY}),
        max_size=2,
    )
)
def test_whatever_a_program_sends_is_taken_or_refused_in_one_line(messages: Any) -> None:
    try:
        taken = checked_messages(messages)
    except UsageError as error:
        lines = str(error).splitlines()
        assert len(lines) == 1
        return
    assert all(isinstance(message["content"], str) for message in taken)
    ToolCallTranslator(None).convert_messages_for_template(taken)


def test_the_model_reads_why_its_calls_cannot_be_read(sampler: Sampler) -> None:
    good, bad = FORMATS["hermes"].render("f", {}), '<tool_call>{"name": "f"'
    encode = sampler.tokenizer.encode
    rows = [
        encode(f"{text}<|im_end|>", add_special_tokens=False)
        for text in (f"{good}{bad}", bad, "done")
    ]
    sampler.next = [(row, "stop") for row in rows]
    managed = ManagedServer(sampler, sampler.tokenizer)
    messages: list[Any] = [asked("q")]
    mixed = asyncio.run(managed.chat_completion(messages=messages, tools=TOOLS)).choices[0].message
    assert [call["function"]["name"] for call in mixed.tool_calls or []] == ["f"]
    messages += [mixed, {"role": "tool", "tool_call_id": "1", "content": "4"}]
    text = asyncio.run(managed.chat_completion(messages=messages, tools=TOOLS)).choices[0].message
    assert (text.content, text.tool_calls) == (bad, None)
    messages += [text, asked("Well?")]
    asyncio.run(managed.chat_completion(messages=messages, tools=TOOLS))
    reason = "error: a tool call cannot be read: a call that does not end with </tool_call>\n\n"
    prompt = sampler.tokenizer.decode(sampler.prompts[-1])
    assert f"{reason}4" in prompt
    assert f"{reason}Well?" in prompt
    (node,) = managed.get_state()["nodes"]
    assert [token for token in node.masked_tokens if token != -100] == [
        token for row in rows for token in row
    ]


def test_half_of_a_surrogate_pair_harms_neither_prompt_nor_answer(sampler: Sampler) -> None:
    half = "\ud800"
    written = f"<tool_call>{json.dumps({'name': f'f{half}', 'arguments': {'a': half}})}</tool_call>"
    sampler.next = [
        (sampler.tokenizer.encode(f"{written}<|im_end|>", add_special_tokens=False), "stop")
    ]
    history = [asked(f"q{half}"), called(name=half, arguments=json.dumps({"a": half})), asked("?")]
    with served(sampler) as http:
        session = http.post("/sessions/create", json={}).json()["uuid"]
        body = json.dumps({"messages": history, "tools": TOOLS})
        answer = http.post(
            f"/{session}/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
        )
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f?"
    assert json.loads(call["function"]["arguments"]) == {"a": half}


def test_a_closing_tag_in_an_argument_does_not_open_reasoning_in_the_history(
    sampler: Sampler,
) -> None:
    managed = ManagedServer(sampler, sampler.tokenizer)
    said = FORMATS["hermes"].render("f", {"a": "</think>"})
    assert "<think>" not in managed.render(
        [asked("q"), {"role": "assistant", "content": said}, asked("?")]
    )
    thought = managed.render(
        [asked("q"), {"role": "assistant", "content": f"hm</think>{said}"}, asked("?")]
    )
    assert thought.count("<think>") == 1
