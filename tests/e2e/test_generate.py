"""POST /generate on a real vLLM: the short form of the answer has the content of the long one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from atroposlib.inference.chat_template import load_tokenizer
from atroposlib.inference.client import APIServerConfig, VLLMServer
from atroposlib.inference.teacher_client import TeacherServer
from example_trainer.models.hf_checkpoint import load_model
from tests import raw_fuzz
from tests.atroposlib.service.killed_service import until
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import TOLERANCE, trainer_logprobs
from tests.e2e.conftest import VllmServer, start_vllm
from tests.fuzz_size import INPUTS, LONG_SECONDS, fuzz_inputs, fuzz_seed
from tests.generated_requests import operations_of, send_generated
from tests.pages import code_blocks, section_of
from tests.raw_requests import Target
from vllm_patching.engine_core.gathered_outputs import STEPS_PER_MESSAGE

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

SAMPLING = {"n": 3, "max_tokens": 24, "seed": 5, "temperature": 1.0, "ignore_eos": True}
PROMPT = [72, 101, 108, 108, 111]
PIECE = 256
"""Tokens of prompts that are computed in one step, at most."""


@pytest.fixture(scope="module")
def server(
    module_processes: Processes,
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmServer:
    flags = ("--max-num-batched-tokens", str(PIECE))
    return start_vllm(
        module_processes, free_port, tiny_model, tmp_path_factory.mktemp("vllm"), flags=flags
    )


def test_the_example_of_the_api_page_is_answered(server: VllmServer) -> None:
    """docs/http-api.md, typed from its own text; its table names every field of the answer."""
    section = section_of(ROOT / "docs" / "http-api.md", "routes-of-the-vllm-server").text
    ((_, command),) = code_blocks(section)
    typed = command.replace("http://127.0.0.1:9001", server.url)
    assert typed != command
    done = subprocess.run(
        ["bash", "-c", typed], capture_output=True, text=True, check=True, timeout=120
    )
    answer = json.loads(done.stdout)
    assert [len(tokens) for tokens in answer["token_ids"]] == [4, 4]
    assert [field for field in answer if f"`{field}`" not in section] == []


def test_numbers_say_what_tables_say(server: VllmServer) -> None:
    long = server.generate(PROMPT, **SAMPLING)
    short = server.generate(PROMPT, **SAMPLING, token_logprobs=True, return_text=False)
    assert "text" not in short
    assert "logprobs" not in short
    assert "token_logprobs" not in long
    assert len(long["text"]) == 3
    for name in (
        "token_ids",
        "finish_reasons",
        "weight_version_spans",
        "weight_epoch_spans",
        "prompt_token_ids",
    ):
        assert short[name] == long[name], name
    for tokens, numbers, tables in zip(
        short["token_ids"], short["token_logprobs"], long["logprobs"], strict=True
    ):
        assert len(tokens) == 24
        assert tables == [
            {str(token): pytest.approx(number, abs=1e-5)}
            for token, number in zip(tokens, numbers, strict=True)
        ]


def test_alternatives_come_as_tables_that_hold_the_sampled_token(server: VllmServer) -> None:
    answer = server.generate(PROMPT, **SAMPLING, logprobs=4)
    for tokens, tables in zip(answer["token_ids"], answer["logprobs"], strict=True):
        for token, table in zip(tokens, tables, strict=True):
            assert str(token) in table
            assert 4 <= len(table) <= 5
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 2, "token_logprobs": True}
    refused = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert refused.status_code == 400, refused.text
    assert "leave one out" in refused.text


def test_stop_strings_stop_where_no_text_is_answered(server: VllmServer) -> None:
    whole = server.generate(PROMPT, **(SAMPLING | {"n": 1}))
    stop = whole["text"][0][10]
    cut = server.generate(
        PROMPT, **(SAMPLING | {"n": 1}), stop=[stop], return_text=False, token_logprobs=True
    )
    assert cut["finish_reasons"] == ["stop"]
    length = len(cut["token_ids"][0])
    assert 0 < length < 24
    assert cut["token_ids"][0] == whole["token_ids"][0][:length]
    assert len(cut["token_logprobs"][0]) == length
    assert cut["weight_version_spans"] == [[[0, length]]]


def test_the_sdk_asks_for_the_short_form(server: VllmServer) -> None:
    async def ask() -> None:
        client = VLLMServer(APIServerConfig(base_url=server.url, server_type="vllm"))
        try:
            generation = await client.generate(input_ids=PROMPT, **SAMPLING)
        finally:
            await client.close()
        assert generation.texts is None
        assert [len(row) for row in generation.output_logprobs] == [24] * 3
        assert [[span.tokens for span in row] for row in generation.weight_spans or []] == [
            [24]
        ] * 3

    asyncio.run(ask())


def test_a_prompt_is_scored_as_the_trainer_would_whatever_is_cached_and_sampled(
    server: VllmServer,
) -> None:
    sequence = [
        (7 * at * at + 3 * at + 5) % 256 for at in range(400)
    ]  # several blocks of the prefix cache
    own = trainer_logprobs(load_model(str(server.model), torch.float32), sequence[:1], sequence[1:])
    tables = server.generate(sequence, max_tokens=1, temperature=0.5, prompt_logprobs=2)[
        "prompt_logprobs"
    ]
    assert [len(table) >= 2 for table in tables] == [False] + [True] * 399
    scored = [[table[str(token)] for table, token in zip(tables[1:], sequence[1:], strict=True)]]

    async def ask() -> None:
        for model in (None, str(server.model)):  # by /generate, and as any vLLM is asked
            teacher = TeacherServer(server.url, model, None, timeout=60, max_requests=2)
            teacher.tokenizer = load_tokenizer(str(server.model))
            try:
                await teacher.start()
                scored.extend([(await teacher.score(sequence))[1:] for _ in range(2)])
            finally:
                await teacher.close()

    asyncio.run(ask())
    assert len(scored) == 5
    for row in scored:
        torch.testing.assert_close(torch.tensor(row), own, rtol=0, atol=TOLERANCE)


def test_a_seed_gives_the_same_tokens_whether_the_prompt_came_in_pieces(server: VllmServer) -> None:
    """It does the first time; the second time most of it is cached. vLLM's CPU build ends on it by
    itself.
    """
    prompt = [(5 * at * at + at) % 251 for at in range(PIECE + 150)]
    first, second = (server.generate(prompt, **SAMPLING | {"n": 1}) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    other = server.generate(prompt, **SAMPLING | {"n": 1, "seed": 6})
    assert other["token_ids"] != first["token_ids"], (
        "if any two were equal, this would prove nothing"
    )


def test_tokens_reach_the_front_end_in_few_messages(server: VllmServer) -> None:
    def outputs() -> float:
        """Return the number of outputs with tokens that the front end has got, except each
        request's first one.
        """
        text = httpx.get(f"{server.url}/metrics", timeout=120).raise_for_status().text
        return sum(
            map(
                float,
                re.findall(
                    r"^vllm:inter_token_latency_seconds_count\S* (\S+)$", text, re.MULTILINE
                ),
            )
        )

    def messages(**fields: object) -> float:
        before = outputs()
        answer = server.generate(
            PROMPT, max_tokens=1 + 2 * STEPS_PER_MESSAGE, ignore_eos=True, seed=1, **fields
        )
        assert len(answer["token_ids"][0]) == 1 + 2 * STEPS_PER_MESSAGE
        return outputs() - before

    for fields in ({}, {"return_text": False, "token_logprobs": True}):
        assert messages(**fields) in (2, 3)  # each request has its turn at another step
    assert messages(stop=["nothing that a byte could be"]) == 2 * STEPS_PER_MESSAGE, (
        "a stop string is looked for at once"
    )


def test_requests_with_and_without_alternatives_share_steps(server: VllmServer) -> None:
    """A step's logprobs come in rows as wide as the widest request of it wants, to the others too."""
    long = SAMPLING | {"max_tokens": 200}
    with ThreadPoolExecutor() as pool:
        numbers = pool.submit(
            server.generate, PROMPT, **long, token_logprobs=True, return_text=False
        )
        tables = [
            server.generate(PROMPT, **(SAMPLING | {"max_tokens": 3}), logprobs=count)
            for count in (4, 1, 2) * 3
        ]
        answer = numbers.result(timeout=120)
    assert [len(row) for row in answer["token_logprobs"]] == [200] * 3
    assert [[len(row) for row in table["logprobs"]] for table in tables] == [[3] * 3] * 9
    again = server.generate(PROMPT, **long, token_logprobs=True, return_text=False)
    assert [pytest.approx(row, abs=1e-4) for row in again["token_logprobs"]] == answer[
        "token_logprobs"
    ]


OURS = re.compile(
    r"/(generate|health_generate|deterministic|sampling|vocabulary|weights|bridge/(?!quar).*|lora/.*|turns/.*)"
)
"""Routes that are fuzzed. A right request to /bridge/quarantine would have the server refuse all
later ones."""
WRITER = {"host": "h", "pid": 1, "started": 1}
JOIN = {
    "trainer": "h 1",
    "mode": "broadcast",
    "parameters": {"w": [[2, 3], "float32"]},
    "weight_epoch": 1,
    "writers": [WRITER],
}
TARGETS = [
    Target(
        "POST",
        "/generate",
        {"prompt": {"prompt_token_ids": PROMPT}, "n": 2, "max_tokens": 4, "seed": 1, "logprobs": 2},
    ),
    Target(
        "POST",
        "/generate",
        {"prompt": "a text", "max_tokens": 3, "stop": ["x"], "token_logprobs": True, "top_p": 0.9},
    ),
    *(
        Target("GET", path)
        for path in ("/health_generate", "/sampling", "/vocabulary", "/weights", "/deterministic")
    ),
    *(
        Target("GET", path)
        for path in ("/bridge/info", "/bridge/state", "/lora/status", "/lora/info", "/turns/status")
    ),
    Target("POST", "/bridge/init", JOIN),
    Target("POST", "/bridge/begin", {"epoch": 1, "version": 1, "cohort": "c"}),
    Target("POST", "/bridge/commit", {"epoch": 1, "version": 1, "checksums": ["0"]}),
    Target("POST", "/bridge/abort", {"epoch": 1, "reason": "r"}),
    Target("POST", "/lora/load", {"path": "/adapters/one", "version": 1}),
]


def in_flight(server: VllmServer) -> int:
    return int(httpx.get(f"{server.url}/weights", timeout=60).json()["in_flight"])


def test_text_that_the_engine_cannot_take_is_refused_and_leaves_no_request(
    server: VllmServer,
) -> None:
    """Half a surrogate pair fails in the message to the engine, on a route of vLLM's own."""
    body = f'{{"model": {json.dumps(str(server.model))}, "prompt": [5], "stop": "\\ud800"}}'
    for path, content, reason in (
        ("/v1/completions", body, "the engine cannot be sent this request"),
        ("/generate", json.dumps({"prompt": "x" * 2_000_000}), "2000000 characters"),
    ):
        answer = httpx.post(
            f"{server.url}{path}",
            content=content,
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        assert (answer.status_code, reason in answer.text) == (400, True), answer.text
        assert in_flight(server) == 0
    text = httpx.post(f"{server.url}/generate", json={"prompt": "Hello"}, timeout=60).json()
    assert text["prompt_token_ids"] == load_tokenizer(str(server.model)).encode("Hello")


@pytest.mark.timeout(LONG_SECONDS)
def test_fuzzed_requests_do_not_break_the_server(server: VllmServer) -> None:
    """Comes last: a server that has received half an update serves no more."""

    def bounded(case: Any) -> None:
        if isinstance(case.body, dict):
            for name, most in (("max_tokens", 4), ("n", 3), ("min_tokens", 4)):
                if isinstance(value := case.body.get(name), int) and value > most:
                    case.body[name] = (
                        most + value % 2**33 // 2**32 * 2**40
                    )  # in bounds, or far outside

    pid, seed, is_long = server.process.command_pid(), fuzz_seed(), bool(os.environ.get(INPUTS))
    files = raw_fuzz.open_files(pid)
    operations = operations_of(
        f"{server.url}/openapi.json", lambda path: bool(OURS.fullmatch(path))
    )
    operations.sort(key=lambda operation: operation.path != "/generate")
    statuses = send_generated(operations, fuzz_inputs(120), seed, bounded)
    print(f"{statuses.total()} requests: {dict(sorted(statuses.items()))}")
    inputs = fuzz_inputs(150)
    outcome = raw_fuzz.run(
        ("localhost", server.port), TARGETS, seed, range(inputs), None if is_long else 3.0
    )
    print(f"{inputs} inputs: {dict(sorted(outcome.statuses.items()))}")
    assert outcome.faults == [], "\n".join(outcome.faults[:5])
    assert raw_fuzz.faults_in(server.process.log_path) == [], f"seed {seed}"
    until(lambda: in_flight(server) == 0, f"seed {seed}: the engine has no requests left")
    until(
        lambda: raw_fuzz.open_files(pid) <= files + 4,
        f"seed {seed}: files are closed ({files} before)",
    )
    server.generate(PROMPT, max_tokens=2)
