"""Managed servers over HTTP: turns, branches, tools, reasoning blocks, lengths, versions."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from atroposlib.errors import RolloutFailure, UsageError
from atroposlib.inference.generation import Span, VersionRecord, Weights, current_versions
from atroposlib.inference.managed_client import ManagedTransport, managed_client
from atroposlib.inference.managed_server import ManagedServerAdapter, say_that_history_changed
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from atroposlib.inference.tool_call_translator import ToolCallTranslator
from atroposlib.inference.vllm_server import VLLMServer, parse_generation

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""A chat template that removes the reasoning of earlier turns, as many do."""
ASK = [{"role": "user", "content": "What is 40 plus 2?"}]


@pytest.fixture
async def manager(shared_inference: str, tokenizer: Any) -> AsyncIterator[ServerManager]:
    made = ServerManager([APIServerConfig(base_url=f"{shared_inference}/v1", server_type="vllm")])
    made.servers[0].tokenizer = tokenizer
    control(made, version=4, delay=0.0, fail_next=0, text=None, cycle=None, generate_options=None)
    yield made
    await made.close()


def control(manager: ServerManager, **change: Any) -> None:
    httpx.post(f"{manager.servers[0].root_url}/control", json=change).raise_for_status()


def last_request(manager: ServerManager) -> dict[str, Any]:
    request: dict[str, Any] = httpx.get(f"{manager.servers[0].root_url}/requests").json()[-1]
    return request


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


async def test_a_later_turn_sends_the_very_tokens_of_the_earlier_ones(manager: ServerManager, tokenizer: Any) -> None:
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


async def test_rewards_of_several_turns_land_on_their_own_tokens(manager: ServerManager, tokenizer: Any) -> None:
    """Four answers to one question; the first and the third are asked again, each on its own, and are rewarded in order."""
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        control(manager, cycle=["one", "two", "three", "four", "again", "again"])
        answer = await managed.chat_completion(messages=ASK, n=4, max_tokens=32)
        for index in (0, 2):
            said = {"role": "assistant", "content": answer.choices[index].message.content}
            await managed.chat_completion(messages=[*ASK, said, {"role": "user", "content": "sure?"}], max_tokens=32)
        nodes = managed.get_state()["nodes"]
    texts = [tokenizer.decode([token for token in node.masked_tokens if token != -100]) for node in nodes]
    end = "<|im_end|>"
    assert texts == [f"one{end}again{end}", f"two{end}", f"three{end}again{end}", f"four{end}"]


async def test_equal_answers_are_told_apart_by_the_answer(manager: ServerManager, tokenizer: Any) -> None:
    """Text alone does not say which of two equal conversations goes on; the answer does say which sequence is its own."""
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        control(manager, cycle=["same", "same", "more"])
        first = await managed.chat_completion(messages=ASK, n=2, max_tokens=32)
        said = {"role": "assistant", "content": first.choices[1].message.content}
        second = await managed.chat_completion(messages=[*ASK, said, {"role": "user", "content": "?"}], max_tokens=32)
        nodes = managed.get_state()["nodes"]
        assert managed.node_of(second) in nodes
        assert tokenizer.decode([t for t in managed.node_of(second).masked_tokens if t != -100]).count("<|im_end|>") == 2
        managed.reset()
        with pytest.raises(KeyError, match="was not made here"):
            managed.node_of(second)


async def test_plain_text_begins_with_the_start_token_of_the_tokenizer(manager: ServerManager, tokenizer_dir: Any) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    starting = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir, bos_token="<|im_start|>")
    template = {"single": f"{starting.bos_token} $A", "special_tokens": [(starting.bos_token, starting.bos_token_id)]}
    starting.backend_tokenizer.post_processor = TemplateProcessing(**template)
    start = starting.bos_token_id
    async with manager.managed_server(tokenizer=starting) as managed:
        for text in ("1 and 2", f"{starting.bos_token}1 and 2"):
            await managed.completion(prompt=text, max_tokens=16)
            sent = last_request(manager)["prompt"]["prompt_token_ids"]
            assert (sent[0], sent.count(start)) == (start, 1), text
        await managed.chat_completion(messages=ASK, max_tokens=16)
        sent = last_request(manager)["prompt"]["prompt_token_ids"]
        assert starting.decode(sent).startswith("<|im_start|>user"), "a chat is sent as its template renders it"
        assert sent.count(start) == 2


async def test_epochs_of_the_weights_come_with_every_completion(manager: ServerManager, tokenizer: Any) -> None:
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


async def test_a_tree_keeps_all_sequences_by_their_text(manager: ServerManager, tokenizer: Any) -> None:
    from atroposlib.inference.managed_server import ManagedServer

    managed = ManagedServer(manager.servers[0], tokenizer, track_tree=True)
    await managed.completion(prompt="1 and 2", max_tokens=16, temperature=0.0)
    await managed.completion(prompt="5 and 6", max_tokens=16, temperature=0.0)
    assert set(managed.get_state()["sequences"]) == {"1 and 2\\boxed{3}", "5 and 6\\boxed{11}"}


async def test_calls_of_tools_become_messages_and_the_same_text_again(manager: ServerManager, tokenizer: Any) -> None:
    # Spacing that no serialiser would write: it must come back as it was.
    raw = 'Let me see.\n<tool_call>\n{"name":"look_up",   "arguments": {"q": "x"}}\n</tool_call>'
    control(manager, text=raw)
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=ASK, tools=TOOLS, max_tokens=256, temperature=1.0)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        (call,) = message.tool_calls
        assert call["function"]["name"] == call.get("function").name == "look_up", "as environments written for Atropos read it"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"q": "x"})
        control(manager, text="done")
        follow_up = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "x is 1"}]
        await managed.chat_completion(messages=follow_up, tools=TOOLS, max_tokens=16, temperature=1.0)
        (node,) = managed.get_state()["nodes"]
    assert raw in node.full_text, "one sequence, with the calls as they were written"


async def test_without_tools_the_text_stays_as_it_is(manager: ServerManager, tokenizer: Any) -> None:
    control(manager, text='<tool_call>{"name": "x"}</tool_call>')
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=ASK, max_tokens=64)
    assert answer.choices[0].message.content == '<tool_call>{"name": "x"}</tool_call>'
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize("text", ["<tool_call>no json</tool_call>", '<tool_call>{"arguments": {}}</tool_call>'])
def test_calls_that_cannot_be_read_stay_text(tokenizer: Any, text: str) -> None:
    assert ToolCallTranslator(tokenizer).parse_model_output(text, tools=TOOLS) == (text, None, "stop")


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


async def test_an_answer_that_the_template_changes_is_said_once(
    manager: ServerManager, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a conversation is several nodes, and an environment that takes the first one trains the first turn alone."""
    say_that_history_changed.cache_clear()
    control(manager, text="<think>hm</think>42")

    async def two_turns() -> int:
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            answer = await managed.chat_completion(messages=ASK, max_tokens=64)
            follow_up = [*ASK, answer.choices[0].message, {"role": "user", "content": "sure?"}]
            await managed.chat_completion(messages=follow_up, max_tokens=64)
            return len(managed.get_state()["nodes"])

    assert await two_turns() == 1
    assert "said once" not in caplog.text
    monkeypatch.setattr(tokenizer, "chat_template", STRIPS)
    assert [await two_turns(), await two_turns()] == [2, 2]
    assert caplog.text.count("This is said once") == 1


async def test_reasoning_of_earlier_turns_is_kept_when_asked_for(manager: ServerManager, tokenizer: Any) -> None:
    history = [*ASK, {"role": "assistant", "content": "<think>hm</think>42"}, {"role": "user", "content": "sure?"}]
    original = tokenizer.chat_template
    tokenizer.chat_template = STRIPS
    try:
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            assert "hm" not in managed.render(history)
        async with manager.managed_server(tokenizer=tokenizer, preserve_think_blocks=True) as managed:
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


async def test_responses_end_where_the_trainer_takes_no_more(manager: ServerManager, tokenizer: Any) -> None:
    server = manager.servers[0]
    prompt = tokenizer.encode("1 and 2")
    server.max_sequence_length = len(prompt) + 4
    generation = await server.generate(input_ids=prompt, max_tokens=500, temperature=0.0)
    assert len(generation.output_tokens[0]) == 4
    assert generation.finish_reasons == ["length"]
    server.max_sequence_length = len(prompt)
    with pytest.raises(RolloutFailure, match="leaves no room within"):
        await server.generate(input_ids=prompt, max_tokens=500)


async def test_many_completions_are_split_and_joined_in_order(manager: ServerManager, tokenizer: Any) -> None:
    manager.max_n_completions = 3
    control(manager, cycle=[f"\\boxed{{{n}}}" for n in range(8)])
    answer = await manager.chat_completion(messages=ASK, n=8)
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert sorted(choice.message.content for choice in answer.choices) == [f"\\boxed{{{n}}}" for n in range(8)]
    generation = await manager.generate(input_ids=[1], n=8, max_tokens=20, temperature=0.001, top_p=0.9)
    assert generation.sampling == [{"temperature": 0.01, "top_p": 0.9, "max_tokens": 20}] * 8, "vLLM samples at no less"
    tokens, outputs, logprobs, reasons = await manager.tokens_and_logprobs_completion(prompt="1 and 2", n=8, max_tokens=20)
    assert tokens == tokenizer.encode("1 and 2")
    assert len(outputs) == len(logprobs) == len(reasons) == 8


async def test_the_versions_that_a_rollout_met_are_noted(manager: ServerManager, tokenizer: Any) -> None:
    record = VersionRecord()
    token = current_versions.set(record)
    try:
        for version in (8, 5):
            control(manager, version=version)
            await asyncio.create_task(manager.generate(input_ids=[1, 2], max_tokens=4))
    finally:
        current_versions.reset(token)
    assert (record.oldest, record.newest) == (5, 8)


async def test_a_failing_request_is_tried_again(manager: ServerManager) -> None:
    control(manager, fail_next=2)
    generation = await manager.generate(input_ids=[1, 2], max_tokens=4)
    assert len(generation.output_tokens) == 1
    control(manager, fail_next=3)
    with pytest.raises(httpx.HTTPStatusError):
        await manager.generate(input_ids=[1, 2], max_tokens=4)


async def test_the_model_is_asked_for_and_the_timings_are_kept(manager: ServerManager, tokenizer_dir: Any) -> None:
    server = manager.servers[0]
    assert await server.model() == str(tokenizer_dir)
    await manager.generate(input_ids=[1], max_tokens=2, split="eval")
    metrics = await server.wandb_metrics({}, "server_0")
    assert metrics["server/server_0_eval_average_num_attempts"] == 1.0
    assert "server/server_0_request_time_avg" not in metrics


@pytest.mark.parametrize(
    ("options", "asked", "left_out"),
    [
        (["return_text", "token_logprobs"], {"return_text": False, "token_logprobs": True}, {"logprobs"}),
        (["token_logprobs"], {"token_logprobs": True}, {"logprobs", "return_text"}),
        ([], {"logprobs": 0}, {"token_logprobs", "return_text"}),
        (None, {"logprobs": 0}, {"token_logprobs", "return_text"}),
    ],
)
async def test_a_server_is_asked_for_the_shortest_answer_that_it_knows(
    manager: ServerManager, options: list[str] | None, asked: dict[str, Any], left_out: set[str]
) -> None:
    control(manager, generate_options=options)
    generation = await manager.generate(input_ids=[1, 2], max_tokens=3)
    request = last_request(manager)
    assert {name: request[name] for name in asked} == asked
    assert not left_out & request.keys()
    assert generation.output_logprobs == [[-0.25 - 0.001 * i for i in range(len(generation.output_tokens[0]))]]
    assert generation.weight_spans == [[Span(Weights(0, 4), len(generation.output_tokens[0]))]]


async def test_alternatives_are_asked_for_in_tables(manager: ServerManager) -> None:
    control(manager, generate_options=["return_text", "token_logprobs"])
    await manager.generate(input_ids=[1, 2], max_tokens=3, logprobs=4)
    request = last_request(manager)
    assert (request["logprobs"], request["return_text"], "token_logprobs" in request) == (4, False, False)


def test_answers_that_do_not_line_up_are_refused() -> None:
    numbers = {"token_logprobs": [[-0.1, -0.2]], "finish_reasons": ["stop"], "token_ids": [[5, 6]]}
    assert parse_generation([1], numbers).output_logprobs == [[-0.1, -0.2]]
    with pytest.raises(ValueError, match="different lengths"):
        parse_generation([1], numbers | {"token_ids": [[5]]})
    with pytest.raises(ValueError, match="zip"):
        parse_generation([1], numbers | {"weight_version_spans": [[[1, 2]]], "weight_epoch_spans": [[]]})
    answer = {"logprobs": [[[{"5": -0.1}], [{"6": -0.2}]]], "finish_reasons": ["stop"], "token_ids": [[5, 6]]}
    assert parse_generation([1], answer).output_logprobs == [[-0.1, -0.2]]
    with pytest.raises(ValueError, match="token_ids"):
        parse_generation([1], answer | {"token_ids": [[5, 7]]})
    with pytest.raises(ValueError, match="prompt_token_ids"):
        parse_generation([1], answer | {"prompt_token_ids": [2]})


async def test_an_openai_endpoint_manages_nothing_unless_placeholders_are_allowed(
    shared_inference: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = ServerManager([APIServerConfig(base_url=f"{shared_inference}/v1", server_type="openai")])
    with pytest.raises(NotImplementedError, match=r"--openai\.server_type vllm"):
        async with manager.managed_server(tokenizer=tokenizer):
            pass
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=ASK, n=2)
        assert [node.metadata["dummy_tokens"] for node in managed.get_state()["nodes"]] == [True, True]
        assert len(answer.choices) == 2
        assert managed.node_of(answer, 1).full_text.endswith(f"assistant:{answer.choices[1].message.content}")
    await manager.close()


def test_no_server_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--openai\.base_url"):
        ServerManager([])


def test_a_class_of_ones_own_is_used() -> None:
    class Own(VLLMServer):
        pass

    manager = ServerManager([APIServerConfig(base_url="http://x")], server_class=Own)
    assert type(manager.servers[0]) is Own


async def test_a_managed_server_without_a_tokenizer_takes_the_one_of_the_servers_settings(
    manager: ServerManager, tokenizer_dir: Path, tokenizer: Any
) -> None:
    known = manager.servers[0].tokenizer
    manager.servers[0].tokenizer, manager.servers[0].config.tokenizer_name = None, str(tokenizer_dir)
    try:
        async with manager.managed_server() as managed:
            assert managed.tokenizer.get_vocab() == tokenizer.get_vocab()
            assert managed._tool_parser_name is None
    finally:
        manager.servers[0].tokenizer, manager.servers[0].config.tokenizer_name = known, "none"


async def test_no_turn_opens_after_one_of_the_assistant(manager: ServerManager, tokenizer: Any) -> None:
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        await managed.chat_completion(messages=[*ASK, {"role": "assistant", "content": "It is"}], max_tokens=16)
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
            assert (request["seed"], request["max_tokens"], request["stop"], request["top_k"]) == (seed, 32, ["never"], -1)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *ASK]
        (node,) = managed.get_state()["nodes"]
        assert managed.node_of(answer) is node
        said = tokenizer.decode([token for token in node.masked_tokens if token != -100])
        assert said == "".join(f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant")
        text = await client.completions.create(model="any", prompt="2 plus 2", max_tokens=8)
        assert text.choices[0].text
        with pytest.raises(openai.NotFoundError, match="chat and text completions alone"):
            await client.embeddings.create(model="any", input="x")
        with pytest.raises(openai.BadRequestError, match="does not stream"):
            await client.chat.completions.create(model="any", messages=ASK, stream=True)
        with pytest.raises(openai.APIStatusError, match="model_dump"):
            await client.chat.completions.create(model="any", messages=ASK, extra_body={"messages": [1]})
        assert isinstance(transport.failure, AttributeError), "what went wrong is kept for the environment"
