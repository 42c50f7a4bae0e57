"""Managed servers over HTTP: turns, branches, tools, reasoning blocks, lengths, versions."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from atroposlib.errors import UsageError
from atroposlib.inference.generation import Weights
from atroposlib.inference.managed_client import ManagedTransport, managed_client
from atroposlib.inference.managed_server import ManagedServerAdapter
from atroposlib.inference.responses import ToolCallTranslator
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from tests.atroposlib.inference.conftest import control, last_request

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
    }
]
STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""A chat template that removes the reasoning of earlier turns, as many do."""
ASK = [{"role": "user", "content": "What is 40 plus 2?"}]


async def test_one_node_per_choice_in_order(manager: ServerManager, tokenizer: Any) -> None:
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=ASK, n=12, max_tokens=32, temperature=1.0)
        nodes = managed.get_state()["nodes"]
    assert len(answer.choices) == len(nodes) == 12
    for choice, node in zip(answer.choices, nodes, strict=True):
        sampled = [token for token in node.masked_tokens if token != -100]
        assert tokenizer.decode(sampled) == f"{choice.message.content}<|im_end|>"
        assert node.weight_version == 4
    assert managed.get_state()["nodes"] == [], "nothing is kept after the block"


async def test_a_later_turn_sends_the_very_tokens_of_the_earlier_ones(
    manager: ServerManager, tokenizer: Any
) -> None:
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        messages: list[Any] = list(ASK)
        first = await managed.chat_completion(messages=messages, max_tokens=32, temperature=0.0)
        earlier = managed.get_state()["nodes"][0].tokens
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "3 plus 4?"},
        ]
        control(manager, version=6)
        await managed.chat_completion(messages=messages, max_tokens=32, temperature=0.0)
        (node,) = managed.get_state()["nodes"]
    assert last_request(manager)["prompt"]["prompt_token_ids"][: len(earlier)] == earlier
    assert node.tokens[: len(earlier)] == earlier
    assert node.weight_version == 4, "the oldest version of its tokens"
    trained = tokenizer.decode([token for token in node.masked_tokens if token != -100])
    assert trained == "\\boxed{42}<|im_end|>\\boxed{7}<|im_end|>"


async def test_rewards_of_several_turns_land_on_their_own_tokens(
    manager: ServerManager, tokenizer: Any
) -> None:
    """Four answers to one question; the first and the third are asked again, each on its own, and
    are rewarded in order.
    """
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        control(manager, cycle=["one", "two", "three", "four", "again", "again"])
        answer = await managed.chat_completion(messages=ASK, n=4, max_tokens=32)
        for index in (0, 2):
            said = {"role": "assistant", "content": answer.choices[index].message.content}
            await managed.chat_completion(
                messages=[*ASK, said, {"role": "user", "content": "sure?"}], max_tokens=32
            )
        nodes = managed.get_state()["nodes"]
    texts = [
        tokenizer.decode([token for token in node.masked_tokens if token != -100]) for node in nodes
    ]
    end = "<|im_end|>"
    assert texts == [f"one{end}again{end}", f"two{end}", f"three{end}again{end}", f"four{end}"]


async def test_equal_answers_are_told_apart_by_the_answer(
    manager: ServerManager, tokenizer: Any
) -> None:
    """Text alone does not show which of two equal conversations goes on; the answer names its own
    sequence.
    """
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        control(manager, cycle=["same", "same", "more"])
        first = await managed.chat_completion(messages=ASK, n=2, max_tokens=32)
        said = {"role": "assistant", "content": first.choices[1].message.content}
        second = await managed.chat_completion(
            messages=[*ASK, said, {"role": "user", "content": "?"}], max_tokens=32
        )
        nodes = managed.get_state()["nodes"]
        assert managed.node_of(second) in nodes
        assert (
            tokenizer.decode([t for t in managed.node_of(second).masked_tokens if t != -100]).count(
                "<|im_end|>"
            )
            == 2
        )
        managed.reset()
        with pytest.raises(KeyError, match="was not made here"):
            managed.node_of(second)


async def test_plain_text_begins_with_the_start_token_of_the_tokenizer(
    manager: ServerManager, tokenizer_dir: Any
) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    starting = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir, bos_token="<|im_start|>")
    template = {
        "single": f"{starting.bos_token} $A",
        "special_tokens": [(starting.bos_token, starting.bos_token_id)],
    }
    starting.backend_tokenizer.post_processor = TemplateProcessing(**template)
    start = starting.bos_token_id
    async with manager.managed_server(tokenizer=starting) as managed:
        for text in ("1 and 2", f"{starting.bos_token}1 and 2"):
            await managed.completion(prompt=text, max_tokens=16)
            sent = last_request(manager)["prompt"]["prompt_token_ids"]
            assert (sent[0], sent.count(start)) == (start, 1), text
        await managed.chat_completion(messages=ASK, max_tokens=16)
        sent = last_request(manager)["prompt"]["prompt_token_ids"]
        assert starting.decode(sent).startswith("<|im_start|>user"), (
            "a chat is sent as its template renders it"
        )
        assert sent.count(start) == 2


async def test_epochs_of_the_weights_come_with_every_completion(
    manager: ServerManager, tokenizer: Any
) -> None:
    control(manager, version=17, epoch=1000)
    try:
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            manager.max_n_completions = 2
            await managed.chat_completion(messages=ASK, n=3, max_tokens=32)
            assert {node.weights for node in managed.get_state()["nodes"]} == {Weights(1000, 17)}
            joined = await manager.generate(input_ids=[1, 2], n=3, max_tokens=4)
            assert joined.weight_epochs == [1000] * 3
    finally:
        control(manager, epoch=None)


async def test_a_tree_keeps_all_sequences_by_their_text(
    manager: ServerManager, tokenizer: Any
) -> None:
    from atroposlib.inference.managed_server import ManagedServer

    managed = ManagedServer(manager.servers[0], tokenizer, track_tree=True)
    await managed.completion(prompt="1 and 2", max_tokens=16, temperature=0.0)
    await managed.completion(prompt="5 and 6", max_tokens=16, temperature=0.0)
    assert set(managed.get_state()["sequences"]) == {"1 and 2\\boxed{3}", "5 and 6\\boxed{11}"}


async def test_calls_of_tools_become_messages_and_the_same_text_again(
    manager: ServerManager, tokenizer: Any
) -> None:
    # Spacing that no serialiser would write: it must come back as it was.
    raw = 'Let me see.\n<tool_call>\n{"name":"look_up",   "arguments": {"q": "x"}}\n</tool_call>'
    control(manager, text=raw)
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(
            messages=ASK, tools=TOOLS, max_tokens=256, temperature=1.0
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        (call,) = message.tool_calls
        assert call["function"]["name"] == call.get("function").name == "look_up", (
            "as environments written for Atropos read it"
        )
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"q": "x"})
        control(manager, text="done")
        follow_up = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "x is 1"}]
        await managed.chat_completion(
            messages=follow_up, tools=TOOLS, max_tokens=16, temperature=1.0
        )
        (node,) = managed.get_state()["nodes"]
    assert raw in node.full_text, "one sequence, with the calls as they were written"


async def test_without_tools_the_text_stays_as_it_is(
    manager: ServerManager, tokenizer: Any
) -> None:
    control(manager, text='<tool_call>{"name": "x"}</tool_call>')
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=ASK, max_tokens=64)
    assert answer.choices[0].message.content == '<tool_call>{"name": "x"}</tool_call>'
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    "text", ["<tool_call>no json</tool_call>", '<tool_call>{"arguments": {}}</tool_call>']
)
def test_calls_that_cannot_be_read_stay_text(tokenizer: Any, text: str) -> None:
    assert ToolCallTranslator(tokenizer).parse_model_output(text, tools=TOOLS) == (
        text,
        None,
        "stop",
    )


def test_calls_from_elsewhere_are_written_out(tokenizer: Any) -> None:
    call = {"id": "elsewhere", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
    (message,) = ToolCallTranslator(tokenizer).convert_messages_for_template(
        [{"role": "assistant", "content": "Hm.", "tool_calls": [call]}]
    )
    assert message == {
        "role": "assistant",
        "content": 'Hm.\n<tool_call>\n{"name": "look_up", "arguments": {"q": 1}}\n</tool_call>',
    }
    with pytest.raises(ValueError, match="'llama9' is not known"):
        ToolCallTranslator(tokenizer, "llama9")


async def test_reasoning_of_earlier_turns_is_kept_when_asked_for(
    manager: ServerManager, tokenizer: Any
) -> None:
    history = [
        *ASK,
        {"role": "assistant", "content": "<think>hm</think>42"},
        {"role": "user", "content": "sure?"},
    ]
    original = tokenizer.chat_template
    tokenizer.chat_template = STRIPS
    try:
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            assert "hm" not in managed.render(history)
        async with manager.managed_server(
            tokenizer=tokenizer, preserve_think_blocks=True
        ) as managed:
            assert "<think>hm</think>42" in managed.render(history)
    finally:
        tokenizer.chat_template = original


async def test_an_openai_face(manager: ServerManager, tokenizer: Any) -> None:
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        client = ManagedServerAdapter(managed, "http://x/v1")
        answer = await client.chat.completions.create(messages=ASK, max_tokens=32, temperature=0.0)
        assert answer.choices[0].message.content == "\\boxed{42}"
        assert len(managed.get_state()["nodes"]) == 1
        with pytest.raises(NotImplementedError):
            await client.post("/x", {}, dict)


async def test_an_openai_endpoint_manages_nothing_unless_placeholders_are_allowed(
    shared_inference: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = ServerManager(
        [APIServerConfig(base_url=f"{shared_inference}/v1", server_type="openai")]
    )
    with pytest.raises(NotImplementedError, match=r"--openai\.server_type vllm"):
        async with manager.managed_server(tokenizer=tokenizer):
            pass
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=ASK, n=2)
        assert [node.metadata["dummy_tokens"] for node in managed.get_state()["nodes"]] == [
            True,
            True,
        ]
        assert len(answer.choices) == 2
        assert managed.node_of(answer, 1).full_text.endswith(
            f"assistant:{answer.choices[1].message.content}"
        )
    await manager.close()


async def test_a_managed_server_without_a_tokenizer_takes_the_one_of_the_servers_settings(
    manager: ServerManager, tokenizer_dir: Path, tokenizer: Any
) -> None:
    known = manager.servers[0].tokenizer
    manager.servers[0].tokenizer, manager.servers[0].config.tokenizer_name = (
        None,
        str(tokenizer_dir),
    )
    try:
        async with manager.managed_server() as managed:
            assert managed.tokenizer.get_vocab() == tokenizer.get_vocab()
            assert managed._tool_parser_name is None
    finally:
        manager.servers[0].tokenizer, manager.servers[0].config.tokenizer_name = known, "none"


async def test_no_turn_opens_after_one_of_the_assistant(
    manager: ServerManager, tokenizer: Any
) -> None:
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        await managed.chat_completion(
            messages=[*ASK, {"role": "assistant", "content": "It is"}], max_tokens=16
        )
        (node,) = managed.get_state()["nodes"]
    assert node.full_text.count("<|im_start|>assistant\n") == 1


async def test_an_openai_client_is_answered_in_this_process_and_its_turns_are_one_sequence(
    manager: ServerManager, tokenizer: Any
) -> None:
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        transport = ManagedTransport(managed, lambda number: {"seed": 7 + number})
        client = managed_client(managed, transport)
        messages: list[Any] = list(ASK)
        for seed in (7, 8):
            answer = await client.chat.completions.create(
                model="any",
                messages=messages,
                max_completion_tokens=32,
                temperature=1.0,
                stop="never",
                extra_body={"top_k": -1},
            )
            request = last_request(manager)
            assert (request["seed"], request["max_tokens"], request["stop"], request["top_k"]) == (
                seed,
                32,
                ["never"],
                -1,
            )
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *ASK]
        (node,) = managed.get_state()["nodes"]
        assert managed.node_of(answer) is node
        said = tokenizer.decode([token for token in node.masked_tokens if token != -100])
        assert said == "".join(
            f"{message['content']}<|im_end|>"
            for message in messages
            if message["role"] == "assistant"
        )
        text = await client.completions.create(model="any", prompt="2 plus 2", max_tokens=8)
        assert text.choices[0].text
        with pytest.raises(openai.NotFoundError, match="chat and text completions alone"):
            await client.embeddings.create(model="any", input="x")
        with pytest.raises(openai.BadRequestError, match="does not stream"):
            await client.chat.completions.create(model="any", messages=ASK, stream=True)
        with pytest.raises(
            openai.BadRequestError, match=r"messages\[0\] is a number: give an object"
        ):
            await client.chat.completions.create(
                model="any", messages=ASK, extra_body={"messages": [1]}
            )
        assert isinstance(transport.failure, UsageError), "the environment gets the error itself"
