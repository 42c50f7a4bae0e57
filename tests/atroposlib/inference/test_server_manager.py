"""Requests to an inference server over HTTP, and its answers: lengths, splits, versions, second
tries.
"""

import asyncio
from typing import Any

import httpx
import pytest

from atroposlib.errors import RolloutFailure, UsageError
from atroposlib.inference import client
from atroposlib.inference.client import CutOff, OpenAIServer, VLLMServer, parse_generation
from atroposlib.inference.generation import Span, VersionRecord, Weights, current_versions
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from tests.atroposlib.inference.conftest import control, last_request
from tests.inference_standin import logprob
from vllm_patching.protocol.routed_experts import from_wire

ASK = [{"role": "user", "content": "What is 40 plus 2?"}]


async def test_responses_end_where_the_trainer_takes_no_more(
    manager: ServerManager, tokenizer: Any
) -> None:
    server = manager.servers[0]
    prompt = tokenizer.encode("1 and 2")
    server.max_sequence_length = len(prompt) + 4
    generation = await server.generate(input_ids=prompt, max_tokens=500, temperature=0.0)
    assert len(generation.output_tokens[0]) == 4
    assert generation.finish_reasons == ["length"]
    server.max_sequence_length = len(prompt)
    with pytest.raises(
        RolloutFailure,
        match=r"leaves no room within \d+ tokens, the most below the trainer's --seq-len",
    ):
        await server.generate(input_ids=prompt, max_tokens=500)


async def test_many_completions_are_split_and_joined_in_order(
    manager: ServerManager, tokenizer: Any
) -> None:
    manager.max_n_completions = 3
    control(manager, cycle=[f"\\boxed{{{n}}}" for n in range(8)])
    answer = await manager.chat_completion(messages=ASK, n=8)
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert sorted(choice.message.content for choice in answer.choices) == [
        f"\\boxed{{{n}}}" for n in range(8)
    ]
    generation = await manager.generate(
        input_ids=[1], n=8, max_tokens=20, temperature=0.001, top_p=0.9
    )
    assert generation.sampling == [{"temperature": 0.01, "top_p": 0.9, "max_tokens": 20}] * 8, (
        "vLLM samples at no less"
    )
    tokens, outputs, logprobs, reasons = await manager.tokens_and_logprobs_completion(
        prompt="1 and 2", n=8, max_tokens=20
    )
    assert tokens == tokenizer.encode("1 and 2")
    assert len(outputs) == len(logprobs) == len(reasons) == 8


async def test_the_versions_that_a_rollout_met_are_noted(
    manager: ServerManager, tokenizer: Any
) -> None:
    record = VersionRecord()
    token = current_versions.set(record)
    try:
        for version in (8, 5):
            control(manager, version=version)
            await asyncio.create_task(manager.generate(input_ids=[1, 2], max_tokens=4))
    finally:
        current_versions.reset(token)
    assert record.oldest_weights == Weights(0, 5)


async def test_a_failing_request_is_tried_again(manager: ServerManager) -> None:
    control(manager, fail_next=2)
    generation = await manager.generate(input_ids=[1, 2], max_tokens=4)
    assert len(generation.output_tokens) == 1
    control(manager, fail_next=3)
    with pytest.raises(httpx.HTTPStatusError):
        await manager.generate(input_ids=[1, 2], max_tokens=4)


async def test_a_healthy_server_that_breaks_off_a_request_gets_it_again_after_growing_pauses(
    manager: ServerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 2**-12)
    monkeypatch.setattr(client, "MAX_PAUSE", 2**-10)
    (server,), sleep = manager.servers, asyncio.sleep
    pauses: list[float] = []
    attempts = 0
    generate = server._generate_wrapper

    async def breaks_off(**fields: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= 6:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return await generate(**fields)

    async def noted(seconds: float) -> None:
        if seconds <= client.MAX_PAUSE:
            pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(server, "_generate_wrapper", breaks_off)
    monkeypatch.setattr(client.asyncio, "sleep", noted)
    generation = await manager.generate(input_ids=[1, 2], max_tokens=4)
    assert len(generation.output_tokens) == 1
    assert [p for p in pauses if p] == [2**-12, 2**-11, 2**-10, 2**-10, 2**-10]


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("how", ["generate", "chat_completion"])
async def test_what_a_server_broke_off_is_asked_for_again(
    manager: ServerManager, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    server = manager.servers[0]
    whole, broken = getattr(server, f"_{how}_wrapper"), [reason]

    async def cut(**kwargs: Any) -> Any:
        answer = await whole(**kwargs)
        if broken and how == "generate":
            answer.finish_reasons[-1] = broken.pop()
        elif broken:
            answer.choices[-1].finish_reason = broken.pop()
        return answer

    monkeypatch.setattr(server, whole.__name__, cut)
    if how == "generate":
        reasons = (await manager.generate(input_ids=[1, 2], n=2, max_tokens=4)).finish_reasons
    else:
        reasons = [
            choice.finish_reason
            for choice in (await manager.chat_completion(messages=ASK, n=2)).choices
        ]
    assert len(reasons) == 2
    assert not broken
    assert reason not in reasons
    assert server.timings["train"][-1][1] == 2
    broken += [reason] * 3
    with pytest.raises(CutOff, match=rf"1 of 1 completions were broken off \({reason}\)"):
        await (
            manager.generate(input_ids=[1, 2], max_tokens=4)
            if how == "generate"
            else manager.chat_completion(messages=ASK)
        )


async def test_the_model_is_asked_for_and_the_timings_are_kept(
    manager: ServerManager, tokenizer_dir: Any
) -> None:
    server = manager.servers[0]
    assert await server.model() == str(tokenizer_dir)
    await manager.generate(input_ids=[1], max_tokens=2, split="eval")
    metrics = await server.wandb_metrics({}, "server_0")
    assert metrics["server/server_0_eval_average_num_attempts"] == 1.0
    assert "server/server_0_request_time_avg" not in metrics


@pytest.mark.parametrize(
    ("options", "asked", "left_out"),
    [
        (
            ["return_text", "token_logprobs"],
            {"return_text": False, "token_logprobs": True},
            {"logprobs"},
        ),
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
    assert generation.output_logprobs == [
        [logprob(token, at) for at, token in enumerate(generation.output_tokens[0])]
    ]
    assert generation.weight_spans == [[Span(Weights(0, 4), len(generation.output_tokens[0]))]]


async def test_alternatives_are_asked_for_in_tables(manager: ServerManager) -> None:
    control(manager, generate_options=["return_text", "token_logprobs"])
    await manager.generate(input_ids=[1, 2], max_tokens=3, logprobs=4)
    request = last_request(manager)
    assert (request["logprobs"], request["return_text"], "token_logprobs" in request) == (
        4,
        False,
        False,
    )


async def test_experts_are_asked_for_where_the_server_keeps_them_and_the_answer_is_trained_on(
    manager: ServerManager,
) -> None:
    control(manager, generate_options=["token_logprobs", "routed_experts"])
    generation = await manager.generate(input_ids=[1, 2], max_tokens=3)
    assert last_request(manager)["routed_experts"] is True
    (word,), (output,) = generation.routed_experts or [], generation.output_tokens
    assert from_wire(word).shape == (1 + len(output), 2, 2)
    assert generation.sampling == [{"temperature": 1.0, "max_tokens": 3}], "nothing else changed"
    evaluated = await manager.generate(input_ids=[1, 2], max_tokens=3, split="eval")
    assert "routed_experts" not in last_request(manager)
    assert evaluated.routed_experts is None


async def test_a_server_that_was_away_is_asked_for_its_options_again(
    manager: ServerManager,
) -> None:
    control(manager, generate_options=["token_logprobs", "routed_experts"], serving=True)
    try:
        server = manager.servers[0]
        await server.generate(input_ids=[1, 2], max_tokens=3)
        control(manager, generate_options=["token_logprobs"], serving=False)
        assert (await server.health()).wrong
        control(manager, serving=True)
        assert (await server.generate(input_ids=[1, 2], max_tokens=3)).routed_experts is None
    finally:
        control(manager, serving=None)


def test_answers_that_do_not_line_up_are_refused() -> None:
    numbers = {"token_logprobs": [[-0.1, -0.2]], "finish_reasons": ["stop"], "token_ids": [[5, 6]]}
    assert parse_generation([1], numbers).output_logprobs == [[-0.1, -0.2]]
    with pytest.raises(ValueError, match="different lengths"):
        parse_generation([1], numbers | {"token_ids": [[5]]})
    with pytest.raises(ValueError, match="zip"):
        parse_generation(
            [1], numbers | {"weight_version_spans": [[[1, 2]]], "weight_epoch_spans": [[]]}
        )
    answer = {
        "logprobs": [[[{"5": -0.1}], [{"6": -0.2}]]],
        "finish_reasons": ["stop"],
        "token_ids": [[5, 6]],
    }
    assert parse_generation([1], answer).output_logprobs == [[-0.1, -0.2]]
    with pytest.raises(ValueError, match="token_ids"):
        parse_generation([1], answer | {"token_ids": [[5, 7]]})
    with pytest.raises(ValueError, match="prompt_token_ids"):
        parse_generation([1], answer | {"prompt_token_ids": [2]})


@pytest.mark.parametrize("server_type", ["openai", "vllm"])
async def test_an_address_is_right_with_or_without_v1(
    shared_inference: str, server_type: Any, tokenizer_dir: Any
) -> None:
    for path in ("", "/", "/v1", "/v1/"):
        manager = ServerManager(
            [APIServerConfig(base_url=f"{shared_inference}{path}", server_type=server_type)]
        )
        assert await manager.servers[0].probe() is None
        answer = await manager.chat_completion(messages=ASK, max_tokens=4)
        assert (answer.model, len(answer.choices)) == (str(tokenizer_dir), 1)
        await manager.close()


def test_an_endpoint_below_another_path_is_asked_there() -> None:
    server = OpenAIServer(APIServerConfig(base_url="https://provider.example/api/openai/"))
    assert (
        str(server.openai.base_url)
        == f"{server.openai_url}/"
        == "https://provider.example/api/openai/"
    )
    assert (
        OpenAIServer(APIServerConfig(base_url="https://a.example/team/v1")).openai_url
        == "https://a.example/team/v1"
    )


def test_no_server_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--openai\.base_url"):
        ServerManager([])


def test_a_class_of_ones_own_is_used() -> None:
    class Own(VLLMServer):
        pass

    manager = ServerManager([APIServerConfig(base_url="http://x")], server_class=Own)
    assert type(manager.servers[0]) is Own
