"""Weights that are not what was announced, with requests in flight: no token is sampled from them, and none is lost."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import httpx
import pytest
import torch

from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.base import BridgeError
from tests.e2e.bridge_helpers import TOLERANCE, joined, new_weights, served_logprobs, trainer_logprobs
from tests.e2e.conftest import VllmServer

pytestmark = pytest.mark.e2e

LENGTH = 450


def sampled_so_far(server: VllmServer) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    assert found, "vLLM counts its tokens under another name"
    return sum(map(float, found))


def test_the_engine_does_not_go_on_with_weights_that_were_not_announced(
    server: VllmServer, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [10, 20, 30]
    with joined(server, "single_copy", free_port, monkeypatch) as (bridge, model):
        for version in range(1, 6):  # on a busy machine the request may have ended before the update begins
            old = load_model(str(server.model), torch.float32)
            old.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
            wrong = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
            answers: list[dict[str, list]] = []  # type: ignore[type-arg]

            def generate(into: list[dict[str, list]] = answers) -> None:  # type: ignore[type-arg]
                into.append(server.generate(prompt, max_tokens=LENGTH, seed=3, ignore_eos=True))

            before = sampled_so_far(server)
            thread = threading.Thread(target=generate)
            thread.start()
            deadline = time.monotonic() + 30
            while sampled_so_far(server) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(BridgeError, match=r"rank 0 received checksum \w+ of version \d, the trainer's is \w+"):
                bridge.sync(version, new_weights(model, version), wrong)
            assert server.state()["state"] == "unhealthy"
            was_running = thread.is_alive()
            stopped_at = sampled_so_far(server)
            time.sleep(0.5)
            assert sampled_so_far(server) == stopped_at, "it went on with weights that nobody has vouched for"
            bridge.sync(version, new_weights(model, version + 100))
            thread.join(60)
            (answer,) = answers
            if not was_running:
                continue
            (spans,) = answer["weight_version_spans"]
            assert [number for number, _ in spans] == [version - 1, version]
            assert sum(count for _, count in spans) == len(answer["token_ids"][0]) == LENGTH
            served, cut = served_logprobs(answer, 0), spans[0][1]
            tokens = answer["token_ids"][0]
            assert (served - trainer_logprobs(old, prompt, tokens))[:cut].abs().max() < TOLERANCE * 5
            assert (served - trainer_logprobs(model, prompt, tokens))[cut:].abs().max() < TOLERANCE * 5
            return
    pytest.fail("no update fell into a request")
