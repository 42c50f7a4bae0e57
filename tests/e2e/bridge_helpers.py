"""The trainer's half of the weight bridge in a test, and comparisons of what a real vLLM serves
with what the trainer holds.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
import torch

from example_trainer.models.decoder import Decoder
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer
from tests.light_servers import SOON
from tests.still_running import json_rows
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import Manifest, flat_layout, source_view
from vllm_patching.server.guard import is_open

PROMPTS = ([72, 101, 108, 108, 111], [1], list(range(30, 130)))
TOLERANCE = 2e-5
"""Largest difference of two float32 logprobs that were computed by different kernels; the weights
differ by far more."""


def trainer_logprobs(
    model: Decoder, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Logprobs, shape (completion,), of the trainer's own forward pass in float32."""
    with torch.no_grad():
        logits = model.logits(torch.tensor([prompt + completion]))[0]
    logprobs = (logits.float() / temperature).log_softmax(-1)
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return logprobs[positions, torch.tensor(completion)]


def served_logprobs(answer: dict[str, list], completion: int) -> torch.Tensor:  # type: ignore[type-arg]
    tokens = answer["token_ids"][completion]
    return torch.tensor(
        [answer["logprobs"][completion][i][str(token)] for i, token in enumerate(tokens)]
    )


def largest_difference(server: VllmServer, model: Decoder) -> float:
    """Over every token sampled from a few prompts: |logprob of vLLM - logprob of the trainer's own
    forward pass|.
    """
    worst = 0.0
    for prompt in PROMPTS:
        answer = server.generate(prompt, n=2, max_tokens=12, seed=7, ignore_eos=True)
        for i, tokens in enumerate(answer["token_ids"]):
            difference = served_logprobs(answer, i) - trainer_logprobs(model, prompt, tokens)
            worst = max(worst, float(difference.abs().max()))
    return worst


def new_weights(model: Decoder, seed: int) -> Callable[[], None]:
    """A write_weights that moves every parameter by a small random amount."""

    def write() -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)

    return write


def new_masters(model: Decoder, seed: int) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Other weights for the model, and what writes them into it."""
    generator = torch.Generator().manual_seed(seed)
    masters = {
        name: parameter.detach() + 0.05 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }

    def write() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])

    return masters, write


def checksums(server: VllmServer, model: Decoder) -> list[str]:
    """Return the checksum of each rank's weights, computed from the trainer's tensors alone."""
    parameters = dict(model.named_parameters())
    ranks = httpx.get(f"{server.url}/bridge/info", timeout=120).json()["ranks"]
    layouts = [flat_layout(Manifest.from_json(rank))[0] for rank in ranks]
    return [
        weights_checksum((item.name, source_view(item, parameters[item.name])) for item in layout)
        for layout in layouts
    ]


@contextmanager
def joined(
    server: VllmServer, kind: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WeightBridge, Decoder]]:
    """A trainer's half of the bridge and its model, with the checkpoint's weights served as version
    0.
    """
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    client = BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)
    bridge = SingleCopyBridge(client) if kind == "single_copy" else BroadcastBridge(client, kind)
    dtype = bridge.serving_dtype()
    assert dtype is torch.float32
    model = load_model(str(server.model), dtype)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    bridge.connect(model)

    def write_initial() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(initial[name])

    bridge.sync(0, write_initial)
    try:
        yield bridge, model
    finally:
        bridge.close()


def made_up_group(number: int) -> dict[str, object]:
    """A group for the tiny model, as an environment posts it: four answers to one prompt, sampled
    under version 0.
    """
    rng = random.Random(number)
    prompt = [rng.randrange(301) for _ in range(3)]
    responses = [[rng.randrange(301) for _ in range(rng.randint(2, 10))] for _ in range(4)]
    return {
        "tokens": [prompt + response for response in responses],
        "masks": [[-100] * 3 + response for response in responses],
        "scores": [float(i % 2) for i in range(4)],
        "inference_logprobs": [
            [1.0] * 3 + [-5.7 + rng.random() for _ in response] for response in responses
        ],
        "weight_versions": [0] * 4,
    }


def wait_for_state(server: VllmServer, wanted: str) -> dict[str, object]:
    deadline = time.monotonic() + SOON
    while (state := server.state())["state"] != wanted:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


def refuses_to_sample(server: VllmServer) -> None:
    """Every route of vLLM's app, except those without sampling, answers 503 with the reason."""
    paths = httpx.get(f"{server.url}/openapi.json", timeout=120).json()["paths"]
    tried = {
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if not is_open(method.upper(), path)
    }
    assert {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/generate"),
    } <= tried
    unlisted = [
        ("POST", "/inference/v1/generate"),
        ("POST", "/invocations"),
        ("GET", "/health_generate"),
        ("GET", "/ping"),
    ]
    for method, path in [*tried, *unlisted]:
        answer = httpx.request(
            method, f"{server.url}{re.sub('{.*?}', 'x', path)}", json={}, timeout=120
        )
        assert answer.status_code == 503, (method, path, answer.text)
        assert "the weights are not whole" in answer.json()["error"]
    for path in ("/metrics", "/version", "/v1/models", "/bridge/info"):
        assert httpx.get(f"{server.url}{path}", timeout=120).status_code == 200


def stalled_of(server: VllmServer, seconds: float = SOON) -> float | None:
    """Return the server's record of its last update, once it has asked its workers; None if it does
    not come in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        last: dict[str, float] = server.state()["last_update"]  # type: ignore[assignment]
        if "stalled" in last:
            return last["stalled"]
        time.sleep(0.1)
    return None


def require_timeline(server: VllmServer, version: int) -> None:
    """Its timeline shows that the server generated, and stood still within the update to a
    version.
    """
    (path,) = server.folder.glob("timeline-generator-*.jsonl")
    head, *spans = json_rows(path)
    assert (head["role"], head["name"].rpartition("-")[2]) == ("generator", str(server.port))
    update = [span for span in spans if span["what"] == "update"][-1]
    halted = [span for span in spans if span["what"] == "halted"][-1]
    assert update["version"] == version
    assert update["begin"] <= halted["begin"] <= halted["end"] <= update["end"]
    assert [
        span for span in spans if span["what"] == "generating" and span["end"] == halted["begin"]
    ]
