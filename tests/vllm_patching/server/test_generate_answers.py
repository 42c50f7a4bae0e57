"""generate.py: what is asked of vLLM for each form of the answer, and how the answer is written."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_patching.compat.outputs import take_logprobs_together
from vllm_patching.protocol.routed_experts import from_wire
from vllm_patching.server.generate import (
    CutOff,
    GenerateRequest,
    Generator,
    LogprobNotFinite,
    TokenPrompt,
)
from vllm_patching.server.routes import LockstepService, make_router
from vllm_patching.server.state import Span, VersionSpans, Weights


@dataclass
class Flat:
    """vLLM's FlatLogprobs, filled as vLLM does it: at each position the sampled token first."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)

    def add(self, *entries: tuple[int, float]) -> None:
        self.start_indices.append(len(self.token_ids))
        for token, logprob in entries:
            self.token_ids.append(token)
            self.logprobs.append(logprob)
        self.end_indices.append(len(self.token_ids))


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: Flat
    text: str = "text"
    finish_reason: str = "length"


def completion(*positions: list[tuple[int, float]]) -> Completion:
    flat = Flat()
    for position in positions:
        flat.add(*position)
    return Completion([position[0][0] for position in positions], flat)


def answer_of(
    monkeypatch: pytest.MonkeyPatch,
    completions: list[Completion],
    prompt: Flat | None = None,
    mode: str = "raw_logprobs",
    **fields: Any,
) -> dict[str, Any]:
    """Return the output of /generate for these completions of the engine, and these logprobs of the
    prompt [1, 2].
    """
    spans = VersionSpans()
    generator = Generator(SimpleNamespace(model_config=SimpleNamespace(logprobs_mode=mode)), spans)
    left = list(completions)

    async def one(token_ids: list[int], parameters: dict[str, Any]) -> tuple[Any, list[Span]]:
        given = left.pop(0)
        output = SimpleNamespace(
            outputs=[given], prompt_logprobs=prompt if "prompt_logprobs" in parameters else None
        )
        return output, [Span(Weights(9, 4), 1), Span(Weights(9, 5), len(given.token_ids) - 1)]

    monkeypatch.setattr(generator, "_one", one)
    request = GenerateRequest(
        prompt=TokenPrompt(prompt_token_ids=[1, 2]), n=len(completions), **fields
    )
    answer: dict[str, Any] = json.loads(asyncio.run(generator.generate(request)).to_json())
    return answer


TWO = [completion([(5, -0.5)], [(6, -1.25)]), completion([(7, -0.1)])]


def test_tables_and_text_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answer_of(monkeypatch, TWO)
    assert answer["logprobs"] == [[{"5": -0.5}, {"6": -1.25}], [{"7": -0.1}]]
    assert answer["text"] == ["text", "text"]
    assert "token_logprobs" not in answer
    assert answer["token_ids"] == [[5, 6], [7]]
    assert answer["weight_version_spans"][0] == [[4, 1], [5, 1]]
    assert answer["weight_epoch_spans"][0] == [9, 9]
    assert (answer["weight_versions"], answer["weight_epochs"], answer["prompt_token_ids"]) == (
        [4, 4],
        [9, 9],
        [1, 2],
    )


def test_numbers_alone_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answer_of(monkeypatch, TWO, token_logprobs=True, return_text=False)
    assert answer["token_logprobs"] == [[-0.5, -1.25], [-0.1]]
    assert not {"logprobs", "text"} & answer.keys()


@given(st.lists(st.floats(-1024, 0, width=32), min_size=1, max_size=20))
def test_logprobs_keep_every_bit(values: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        given = completion(*([(index, value)] for index, value in enumerate(values)))
        assert answer_of(monkeypatch, [given], token_logprobs=True)["token_logprobs"] == [values]


def test_alternatives_that_cannot_be_sampled_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = completion([(5, -0.5), (6, -0.25), (9, -math.inf)], [(6, -0.1), (6, -0.1), (8, -3.0)])
    answer = answer_of(monkeypatch, [given], logprobs=2)
    assert answer["logprobs"] == [[{"5": -0.5, "6": -0.25}, {"6": -0.1, "8": -3.0}]]
    assert answer_of(monkeypatch, [given], token_logprobs=True)["token_logprobs"] == [[-0.5, -0.1]]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_no_number_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    given = completion([(5, -0.5)], [(6, value)])
    with pytest.raises(
        LogprobNotFinite, match=r"token 6 at position 1 of a completion is -?(nan|inf).*the trainer"
    ):
        answer_of(monkeypatch, [given], token_logprobs=True)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_sample_that_was_broken_off_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    cut = completion([(5, -0.5)])
    cut.finish_reason = reason
    nothing = Completion([], Flat(), "", reason)
    for group, message in (
        ([*TWO, cut], "1 of 3 samples"),
        ([nothing, TWO[0]], "1 of 2"),
        ([cut, nothing], "2 of 2"),
    ):
        with pytest.raises(CutOff, match=rf"{message}.*\({reason}\).*ask again"):
            answer_of(monkeypatch, group, token_logprobs=True)


@pytest.mark.parametrize(
    ("fields", "detokenize"),
    [
        ({}, True),
        ({"return_text": False}, False),
        ({"return_text": False, "stop": ["x"]}, True),
        ({"stop": "x"}, True),
    ],
)
def test_vllm_makes_text_only_where_it_is_needed(fields: dict[str, Any], detokenize: bool) -> None:
    parameters = GenerateRequest(prompt="x", seed=7, **fields).sampling_parameters(2)
    assert (parameters["detokenize"], parameters["flat_logprobs"], parameters["seed"]) == (
        detokenize,
        True,
        9,
    )
    assert not {"prompt", "n", "return_text", "token_logprobs"} & parameters.keys()


def test_numbers_have_no_place_for_alternatives() -> None:
    with pytest.raises(ValidationError, match=r"logprobs 3 asks for alternatives.*leave one out"):
        GenerateRequest(prompt="x", logprobs=3, token_logprobs=True)
    with pytest.raises(
        ValidationError,
        match=r"prompt_logprobs 1 asks for alternatives.*prompt_token_logprobs.*leave one out",
    ):
        GenerateRequest(prompt="x", prompt_logprobs=1, prompt_token_logprobs=True)


def scored(*positions: list[tuple[int, float]]) -> Flat:
    """vLLM's logprobs of a prompt: nothing at the first position."""
    flat = Flat()
    flat.add()
    for position in positions:
        flat.add(*position)
    return flat


def test_a_prompt_is_scored_once_however_many_samples_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = answer_of(
        monkeypatch, TWO, scored([(2, -0.75)]), token_logprobs=True, prompt_token_logprobs=True
    )
    assert numbers["prompt_token_logprobs"] == [None, -0.75]
    assert "prompt_logprobs" not in numbers
    impossible = answer_of(
        monkeypatch, TWO, scored([(2, -math.inf)]), token_logprobs=True, prompt_token_logprobs=True
    )
    assert impossible["prompt_token_logprobs"] == [None, -9999.0], (
        "the weights are whole, and JSON has no infinity"
    )
    tables = answer_of(
        monkeypatch, TWO, scored([(2, -0.75), (9, -0.5), (8, -math.inf)]), prompt_logprobs=2
    )
    assert tables["prompt_logprobs"] == [{}, {"2": -0.75, "9": -0.5}]
    assert "prompt_token_logprobs" not in tables
    assert (
        not {"prompt_logprobs", "prompt_token_logprobs"}
        & answer_of(monkeypatch, TWO, scored([(2, -0.75)])).keys()
    )
    asked = GenerateRequest(prompt="x", n=2, prompt_token_logprobs=True)
    assert [asked.sampling_parameters(sample).get("prompt_logprobs") for sample in (0, 1)] == [
        0,
        None,
    ]


@pytest.mark.parametrize(
    ("prompt", "mode", "error", "message"),
    [
        (
            scored([(2, math.nan)]),
            "raw_logprobs",
            LogprobNotFinite,
            "token 2 at position 0 of the prompt but for its first",
        ),
        (
            scored(),
            "raw_logprobs",
            RuntimeError,
            "scored 1 positions of a prompt, which differ from its 2 tokens",
        ),
        (scored([(3, -1.0)]), "raw_logprobs", RuntimeError, "which differ from its 2 tokens"),
        (
            scored([(2, -1.0)]),
            "raw_logits",
            ValueError,
            "--logprobs-mode raw_logits and has logits",
        ),
    ],
)
def test_a_prompt_that_was_not_scored_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, prompt: Flat, mode: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        answer_of(monkeypatch, TWO, prompt, mode, prompt_token_logprobs=True)


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_logprobs_taken_together_are_those_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch, num_logprobs: int
) -> None:
    logprobs = pytest.importorskip("vllm.v1.engine.logprobs", reason="needs vLLM")
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.outputs import LogprobsLists

    processor = logprobs.LogprobsProcessor
    monkeypatch.setattr(
        processor, "_update_sample_logprobs", processor._update_sample_logprobs
    )  # put back afterwards
    draw, width = np.random.default_rng(0), num_logprobs + 1
    steps = [
        LogprobsLists(
            draw.integers(0, 99, (n, width)),
            draw.normal(size=(n, width)).astype("f4"),
            draw.integers(0, 9, n),
            None,
        )
        for n in (1, 16, 3)
    ]
    taken = []
    for patch in (lambda: None, take_logprobs_together):
        patch()
        found = processor(None, FlatLogprobs(), None, 0.0, num_logprobs, None)
        for rows in steps:
            found._update_sample_logprobs(rows)
        taken.append(found)
    one_by_one, together = taken
    assert together.logprobs == one_by_one.logprobs
    assert together.cumulative_logprob == pytest.approx(one_by_one.cumulative_logprob)


async def _call(
    service: LockstepService, messages: asyncio.Queue[dict[str, Any]]
) -> list[dict[str, Any]]:
    """POST /generate by ASGI; what comes from the client is put into `messages`."""
    app, sent = FastAPI(), list[dict[str, Any]]()
    app.include_router(make_router(service))

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "query_string": b"",
        "headers": headers,
    }
    await asyncio.wait_for(app(scope, messages.get, send), 120)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("goes", [False, True])
def test_a_client_that_goes_away_is_not_sampled_for(goes: bool) -> None:
    async def run() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        class Slow:
            async def generate(self, request: GenerateRequest) -> Any:
                began.set()
                try:
                    if goes:
                        await asyncio.Event().wait()
                    return SimpleNamespace(to_json=lambda: b'{"n":%d}' % request.n)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

        service = LockstepService()
        service.generator = Slow()  # type: ignore[assignment]
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = json.dumps({"prompt": "x", "n": 3}).encode()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        call = asyncio.create_task(_call(service, messages))
        await asyncio.wait_for(began.wait(), 120)
        if goes:
            messages.put_nowait({"type": "http.disconnect"})
        start, content = await call
        assert start["status"] == (499 if goes else 200)
        assert goes or content["body"] == b'{"n":3}'
        if goes:
            await asyncio.wait_for(cancelled.wait(), 120)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CutOff("3 of 8 samples were broken off (abort)"), b"3 of 8 samples were broken off"),
        (ConnectionError("no engine"), b"engine process has died; restart the server"),
    ],
)
def test_a_group_that_was_broken_off_may_be_asked_of_another_server(
    error: Exception, said: bytes
) -> None:
    async def run() -> list[dict[str, Any]]:
        class Ending:
            async def generate(self, request: GenerateRequest) -> Any:
                service.engine = SimpleNamespace(errored=True)
                raise error

        service = LockstepService()
        service.generator = Ending()  # type: ignore[assignment]
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = b'{"prompt": {"prompt_token_ids": [1]}, "n": 8}'
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        return await _call(service, messages)

    start, told = asyncio.run(run())
    assert start["status"] == 503
    assert said in told["body"]


def routed(monkeypatch: pytest.MonkeyPatch, tokens: int | None, keeps: bool = True) -> list[str]:
    """Return the experts that /generate answers for a prompt of two tokens and a completion of two.

    Args:
        tokens: vLLM has the experts of so many; None: it has none.
        keeps: vLLM keeps experts.
    """
    spans = VersionSpans()
    aux = SimpleNamespace(enable_return_routed_experts=keeps)
    engine = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        vllm_config=SimpleNamespace(aux_output_config=aux),
    )
    generator = Generator(engine, spans)
    sample = completion([(5, -1.0)], [(6, -2.0)])
    experts = None if tokens is None else np.arange(tokens * 4, dtype=np.uint8).reshape(-1, 2, 2)
    sample.routed_experts = experts  # type: ignore[attr-defined]

    async def one(token_ids: list[int], parameters: dict[str, Any]) -> tuple[Any, list[Span]]:
        assert "routed_experts" not in parameters
        output = SimpleNamespace(outputs=[sample], prompt_logprobs=None)
        return output, [Span(Weights(9, 4), 2)]

    monkeypatch.setattr(generator, "_one", one)
    request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids=[1, 2]), routed_experts=True)
    answer = json.loads(asyncio.run(generator.generate(request)).to_json())
    words: list[str] = answer["routed_experts"]
    return words


def test_experts_of_all_tokens_but_the_last_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    (word,) = routed(monkeypatch, 3)
    assert from_wire(word).tolist() == np.arange(12).reshape(3, 2, 2).tolist()


@pytest.mark.parametrize("tokens", [None, 2, 4])
def test_experts_of_other_tokens_are_not_answered(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="where the model has read 3"):
        routed(monkeypatch, tokens)


def test_experts_that_vllm_does_not_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="start it with --enable-return-routed-experts"):
        routed(monkeypatch, 3, keeps=False)


@pytest.mark.parametrize(
    ("error", "trouble", "status"),
    [
        (LogprobNotFinite("NaN"), "", 503),
        (RuntimeError(), "vLLM's engine process has died", 503),
        (RuntimeError("unknown"), "", 500),
    ],
)
def test_a_check_that_fails_is_answered_with_its_reason(
    error: Exception, trouble: str, status: int
) -> None:
    async def check(seconds: float) -> float:
        service.unavailable = lambda: trouble  # type: ignore[method-assign]
        raise error

    service = LockstepService()
    service.generator = SimpleNamespace(check=check)  # type: ignore[assignment]
    service.unavailable = lambda: ""  # type: ignore[method-assign]
    app = FastAPI()
    app.include_router(make_router(service))
    answer = TestClient(app, raise_server_exceptions=False).get("/health_generate")
    assert answer.status_code == status
    if status == 503:
        assert answer.json()["error"] == (trouble or str(error))
