"""Shared parts of the tests of LoRA with the real vLLM: adapters to serve, and their values in the
trainer's own forward pass.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from example_trainer.models import Decoder, load_model
from example_trainer.models.lora.layers import adapters_of, attach_adapters
from example_trainer.models.lora.settings import LoraSettings
from tests.e2e.bridge_helpers import trainer_logprobs
from tests.e2e.conftest import VllmServer
from tests.example_trainer.models.textbook import merged_weights
from vllm_patching.weights.families import PROJECTIONS

PROMPTS = ([72, 101, 108, 108, 111], [1], list(range(30, 230)))
"""The last one is longer than a block of the prefix cache, which has 128 tokens on a CPU."""
TOLERANCE = 2e-5
"""Largest difference of two float32 logprobs that were computed by different kernels; adapters
change them by far more."""
CLEARLY = 0.2
SETTINGS = LoraSettings(8, 16.0, 0.0, PROJECTIONS)


def adapted(folder: Path, settings: LoraSettings = SETTINGS) -> Decoder:
    model = load_model(str(folder), torch.float32)
    attach_adapters(model, settings)
    return model


def redraw(model: Decoder, seed: int) -> Callable[[], None]:
    """A write_weights that gives every adapter other random values."""

    def write() -> None:
        generator = torch.Generator().manual_seed(seed)
        for found in adapters_of(model):
            for parameter in found.adapter.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    return write


def merged(model: Decoder, folder: Path) -> Decoder:
    whole = load_model(str(folder), torch.float32)
    whole.load_state_dict(merged_weights(model))
    return whole


def difference(answer: dict[str, Any], model: Decoder, temperature: float = 1.0) -> float:
    """Over every token of an answer: |logprob of vLLM - logprob of the trainer's own forward pass|."""
    worst = 0.0
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        served = torch.tensor(
            [position[str(token)] for position, token in zip(logprobs, tokens, strict=True)]
        )
        ours = trainer_logprobs(model, answer["prompt_token_ids"], tokens, temperature)
        worst = max(worst, float((served - ours).abs().max()))
    return worst


def sample(server: VllmServer, version: int) -> list[dict[str, Any]]:
    answers = [
        server.generate(prompt, n=2, max_tokens=12, seed=7, ignore_eos=True) for prompt in PROMPTS
    ]
    assert all(answer["weight_versions"] == [version, version] for answer in answers)
    return answers


def status(server: VllmServer) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{server.url}/lora/status", timeout=120).json()
    return answer


def metric(server: VllmServer, name: str) -> float:
    """Sum of a counter over its labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=120).text
    return sum(
        float(value)
        for value in re.findall(rf"^{re.escape(name)}(?:{{\S*)? (\S+)", text, re.MULTILINE)
    )


def wait_for_requests(server: VllmServer, count: int) -> None:
    """Until so many requests use the newest adapter."""
    deadline = time.monotonic() + 120
    while (found := status(server)["current"]["requests"]) != count:
        assert time.monotonic() < deadline, f"{found} requests use the newest adapter, not {count}"


def load(server: VllmServer, path: Path | str, **body: object) -> httpx.Response:
    return httpx.post(
        f"{server.url}/lora/load", json={"path": str(path), "version": 99, **body}, timeout=60
    )
