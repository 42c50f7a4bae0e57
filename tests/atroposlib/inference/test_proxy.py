"""A managed server behind its proxy, each a process of its own: another program talks, the
environment reads the tokens.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from atroposlib.errors import UsageError
from atroposlib.inference.proxy import create_app
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from tests.atroposlib.envs.env_stack import OFFLINE, Stack
from tests.atroposlib.inference.template_shapes import STARTER, Sampler, Shape

ASK: Any = [{"role": "user", "content": "What is 40 plus 2?"}]


@pytest.fixture
def proxy(
    stack: Stack,
    shared_inference: str,
    processes: Any,
    free_port: Callable[[], int],
    tokenizer_dir: Path,
) -> str:
    stack.use_inference(shared_inference, version=3)
    port = free_port()
    module = "atroposlib.inference.proxy"
    flags = [
        "--base-url",
        f"{shared_inference}/v1",
        "--tokenizer",
        str(tokenizer_dir),
        "--port",
        str(port),
    ]
    processes.start("proxy", [sys.executable, "-m", module, *flags], OFFLINE)
    processes.wait_for_http(f"http://127.0.0.1:{port}/health", 120)
    return f"http://127.0.0.1:{port}"


@pytest.mark.e2e
async def test_what_another_program_asks_for_is_kept_token_for_token(
    proxy: str, tokenizer: Any
) -> None:
    manager = ServerManager([APIServerConfig(base_url="http://not-used")], proxy_url=proxy)
    async with manager.managed_server() as managed:
        client = openai.AsyncOpenAI(base_url=managed.get_url(), api_key="x", max_retries=0)
        theirs = await client.chat.completions.create(model="any", messages=ASK, temperature=0.0)
        assert theirs.choices[0].message.content == "\\boxed{42}"
        ours = await managed.chat_completion(messages=ASK, n=2, max_tokens=32)
        nodes = (await managed.fetch_state())["nodes"]
        assert len(nodes) == 1 + len(ours.choices)
        assert (
            tokenizer.decode([token for token in nodes[0].masked_tokens if token != -100])
            == "\\boxed{42}<|im_end|>"
        )
        assert {node.weight_version for node in nodes} == {3}
        assert [managed.node_of(ours, index) for index in range(2)] == nodes[1:]
        async with httpx.AsyncClient(base_url=proxy, timeout=120) as http:
            empty = await http.post(
                f"/{managed.session_uuid}/v1/chat/completions", json={"messages": []}
            )
            assert (empty.status_code, empty.json()["error"]["message"]) == (
                400,
                "messages must not be empty",
            )
            rendered = await http.post(
                f"/{managed.session_uuid}/v1/chat/completions/render", json={"messages": ASK}
            )
            assert rendered.json()["token_ids"] == tokenizer.encode(rendered.json()["prompt_text"])
            assert (await http.get("/nobody/nodes")).status_code == 404
            assert (
                await http.post("/sessions/create", json={"tool_parser": "unknown"})
            ).status_code == 400
            assert len((await http.get("/sessions")).json()["sessions"]) == 1
            servers = [
                {"base_url": f"http://127.0.0.1:{port}/v1", "server_type": "vllm"}
                for port in (9, 10)
            ]
            setup = await http.post("/setup", json={"servers": servers, "model_name": "next"})
            assert setup.json() == {"status": "ok", "servers": 2, "model_name": "next"}
            assert (await http.get("/health")).json()["model"] == "next"
            assert (await http.get("/servers")).json()["servers"][1]["base_url"] == servers[1][
                "base_url"
            ]
            assert (await http.post("/setup", json={"servers": []})).status_code == 400
            assert (await managed.chat_completion(messages=ASK)).choices, (
                "a session keeps its server"
            )
        await client.close()
    async with httpx.AsyncClient(base_url=proxy, timeout=120) as http:
        assert (await http.get("/sessions")).json() == {"sessions": []}, (
            "a session ends with its block"
        )


def test_a_program_that_keeps_reasoning_apart_continues_its_answers() -> None:
    """The template opens the reasoning and writes none into the history; the program sends it back
    in a field of its own.
    """
    sampler = Sampler(PreTrainedTokenizerFast.from_pretrained(STARTER))
    sampler.tokenizer.chat_template = Shape("<think>\n", "reasoning removed").template
    manager: Any = SimpleNamespace(servers=[sampler], pick=lambda: sampler)
    rows = [
        sampler.tokenizer.encode(text, add_special_tokens=False)
        for text in ("hm</think>\n\n2<|im_end|>", "3<|im_end|>")
    ]
    sampler.next = [(row, "stop") for row in rows]
    with TestClient(create_app(manager, sampler.tokenizer), base_url="http://127.0.0.1") as http:
        session = http.post("/sessions/create", json={}).json()["uuid"]
        first = http.post(f"/{session}/v1/chat/completions", json={"messages": ASK}).json()[
            "choices"
        ][0]["message"]
        reasoning, _, content = first["content"].partition("</think>")
        said = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        body = {"messages": [*ASK, said, {"role": "user", "content": "sure?"}]}
        rendered = http.post(f"/{session}/v1/chat/completions/render", json=body).json()
        http.post(f"/{session}/v1/chat/completions", json=body)
        (node,) = http.get(f"/{session}/nodes").json()["nodes"]
    assert sampler.prompts[1] == rendered["token_ids"]
    assert sampler.tokenizer.decode(rendered["token_ids"]) == rendered["prompt_text"]
    assert [token for token in node["masked_tokens"] if token != -100] == rows[0] + rows[1]
    assert node["metadata"]["opened"] == "<think>\n"


async def test_a_proxy_without_an_address_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_PROXY_URL", raising=False)
    manager = ServerManager([APIServerConfig(base_url="http://x")], use_proxy=True)
    with pytest.raises(UsageError, match=r"--proxy_url"):
        async with manager.managed_server():
            pass
