"""Which logprobs a server hands out, and whether --temperature goes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from example_trainer.algorithm.losses import LossInputs, LossSettings, grpo
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.models.head import chosen_logprobs
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.logprobs_mode import check_logprobs, require_fitting_logprobs
from tests.http_server import Answer, HttpServer, Request
from vllm_patching.server.routes import LockstepService, make_router

Serve = Callable[[int, object], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that answers GET /sampling so; returns its port."""
    with ExitStack() as servers:

        def start(status: int, answer: object) -> int:
            def sampling(request: Request) -> Answer:
                if request.path != "/sampling":
                    return 404, answer
                return status, answer

            return servers.enter_context(HttpServer(sampling)).port

        yield start


def options(*ports: int, temperature: float = 1.0, replay: bool = False) -> TrainerConfig:
    servers = [f"127.0.0.1:{port}" for port in ports]
    return TrainerConfig(
        model_name="any",
        vllm_servers=servers,
        temperature=temperature,
        weight_bridge_mode="shared_vllm",
        router_replay=replay,
    )


@pytest.mark.parametrize(
    ("mode", "temperature", "problem"),
    [
        ("raw_logprobs", 1.0, None),
        (
            "raw_logprobs",
            0.6,
            r"--temperature 0\.6.*--logprobs-mode processed_logprobs.*--temperature 1",
        ),
        ("processed_logprobs", 1.0, None),
        ("processed_logprobs", 0.6, None),
        ("raw_logits", 1.0, "raw_logits, which are not logprobs"),
        ("processed_logits", 0.6, "processed_logits, which are not logprobs"),
    ],
)
def test_every_server_is_asked(
    serve: Serve, mode: str, temperature: float, problem: str | None
) -> None:
    good, asked = (
        serve(200, {"logprobs_mode": "processed_logprobs"}),
        serve(200, {"logprobs_mode": mode}),
    )
    config = options(good, asked, temperature=temperature)
    if problem is None:
        found = check_logprobs(config, Ranks())
        urls = tuple(f"http://127.0.0.1:{port}" for port in (good, asked))
        assert found.processed + found.raw == urls
        assert found.raw == (urls[1:] if mode == "raw_logprobs" else ())
        assert found.unknown == ()
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        check_logprobs(config, Ranks())
    assert f":{asked}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [(404, {"detail": "Not Found"}), (200, ["something else"]), (401, {"error": "key"}), None],
)
def test_of_a_server_that_does_not_say_it_is_told_what_is_assumed(
    serve: Serve,
    free_port: Callable[[], int],
    caplog: pytest.LogCaptureFixture,
    answer: tuple[int, object] | None,
) -> None:
    port = free_port() if answer is None else serve(*answer)
    assert check_logprobs(options(port), Ranks()).unknown == (f"http://127.0.0.1:{port}",)
    assert not caplog.records
    check_logprobs(options(port, temperature=0.6), Ranks())
    assert f":{port} cannot be asked" in caplog.text
    assert "taken to be of temperature 0.6" in caplog.text


def test_replay_needs_experts_of_every_server(serve: Serve) -> None:
    answer = {"logprobs_mode": "raw_logprobs", "generate_options": ["return_text"]}
    keeps = serve(200, answer | {"generate_options": ["return_text", "routed_experts"]})
    lacks = serve(200, answer)
    assert len(check_logprobs(options(keeps, lacks), Ranks()).raw) == 2
    assert len(check_logprobs(options(keeps, replay=True), Ranks()).raw) == 1
    problem = f":{lacks} does not keep the experts.*Start it with --enable-return-routed-experts"
    with pytest.raises(ConfigError, match=problem):
        check_logprobs(options(keeps, lacks, replay=True), Ranks())
    join = require_fitting_logprobs(options(replay=True))
    join(f"http://127.0.0.1:{keeps}", {})
    with pytest.raises(ConfigError, match=problem):
        join(f"http://127.0.0.1:{lacks}", {})


def test_the_route_answers_once_the_engine_is_there() -> None:
    service = LockstepService()
    app = FastAPI()
    app.include_router(make_router(service))
    client = TestClient(app)
    assert client.get("/sampling").status_code == 503
    service.engine = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs")
    )
    answer = client.get("/sampling").json()
    assert answer["logprobs_mode"] == "processed_logprobs"
    assert "routed_experts" not in answer["generate_options"]
    service.engine.model_config.enable_return_routed_experts = True
    assert "routed_experts" in client.get("/sampling").json()["generate_options"]


def test_what_a_mode_that_does_not_fit_would_do() -> None:
    """Raw logprobs beside a temperature of 0.6: ratios are far from 1 though nothing has changed,
    and the gradient turns.
    """
    torch.manual_seed(0)
    hidden, weight = torch.randn(400, 16), torch.randn(50, 16)
    targets = torch.multinomial((hidden @ weight.t() / 0.6).softmax(-1), 1).squeeze(1)
    advantages, one_sequence = torch.randn(400), torch.zeros(400, dtype=torch.int64)

    def gradient(rollout_temperature: float) -> torch.Tensor:
        matrix = weight.clone().requires_grad_()
        logprobs, _ = chosen_logprobs(hidden, matrix, targets, temperature=0.6)
        rollout, _ = chosen_logprobs(hidden, weight, targets, temperature=rollout_temperature)
        inputs = LossInputs(logprobs, rollout, advantages, one_sequence, 1)
        (found,) = torch.autograd.grad(grpo(inputs, LossSettings(0.2, 0.2)).losses.mean(), matrix)
        return found.flatten()

    right = gradient(0.6)
    assert torch.cosine_similarity(gradient(1.0), right, dim=0) < 0.9
    assert torch.cosine_similarity(gradient(0.6), right, dim=0) > 0.9999
