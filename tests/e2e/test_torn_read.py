"""No token is sampled from weights of which the trainer has written a half: requests run while it writes in vLLM's memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from example_trainer.models.decoder import Decoder
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.base import SyncReport, Weights
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer

pytestmark = pytest.mark.e2e

STREAMS = 3
TOLERANCE = 1e-3
"""Largest difference of a served logprob to the forward pass that it came from; the sets of weights here are further apart."""


class UnfencedBridge(SingleCopyBridge):
    """What a single copy would be without the pause: written while the server samples."""

    def _update(self, version: int, write_weights: Callable[[], None], masters: Weights | None = None) -> SyncReport:
        write_weights()
        return SyncReport(version=version, checksum="", bytes_moved=0)


class Requests:
    """Completions of random prompts and lengths, one after another in each of a few threads."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._problems: list[BaseException] = []
        self.answers: list[dict[str, list]] = []  # type: ignore[type-arg]
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(STREAMS)]

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._stop.is_set():
                prompt = [rng.randrange(256) for _ in range(rng.randint(2, 20))]
                options = {"max_tokens": rng.randint(8, 96), "seed": rng.randrange(10**6), "ignore_eos": True}
                self.answers.append(self._server.generate(prompt, **options))
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self._problems.append(error)

    def wait_for_more(self, count: int) -> None:
        """Return when `count` requests more than now have been answered."""
        target, deadline = len(self.answers) + count, time.monotonic() + 60
        while len(self.answers) < target:
            if self._problems:
                raise self._problems[0]
            assert time.monotonic() < deadline, f"only {len(self.answers)} of {target} requests were answered"
            time.sleep(0.01)

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(60)
        assert not self._problems, self._problems[0]


def write(model: Decoder, source: Decoder, first_half: bool) -> None:
    """Copy every other parameter, or the rest, into the memory that `model` shares with the server."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if (number % 2 == 0) == first_half:
                parameter.copy_(source.get_parameter(name))


def differences(answer: dict[str, list], models: list[Decoder]) -> torch.Tensor:  # type: ignore[type-arg]
    """[models, tokens]: |served logprob - the model's own| of each token of a completion, in float32."""
    prompt, tokens = answer["prompt_token_ids"], answer["token_ids"][0]
    served = torch.tensor([row[str(token)] for row, token in zip(answer["logprobs"][0], tokens, strict=True)])
    rows = []
    for model in models:
        with torch.no_grad():
            table = model.logits(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        rows.append((table.gather(1, torch.tensor(tokens)[:, None])[:, 0] - served).abs())
    return torch.stack(rows)


@pytest.mark.parametrize(("fenced", "updates"), [(True, 5), (False, 2)])
def test_a_token_comes_from_one_set_of_weights(server: VllmServer, fenced: bool, updates: int) -> None:
    """With the pause, every token is the old or the new weights' own, as its version says; without it, some are neither's."""
    models = [load_model(str(server.model), torch.float32) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    bridge = (SingleCopyBridge if fenced else UnfencedBridge)(BridgeServer("localhost", server.port, BRIDGE_TIMEOUT))
    shared = load_model(str(server.model), torch.float32)
    bridge.connect(shared)
    requests = Requests(server)

    def write_slowly(source: Decoder) -> None:
        write(shared, source, first_half=True)
        if fenced:
            time.sleep(0.3)  # nothing is answered now, so there is nothing else to wait for
        else:
            requests.wait_for_more(STREAMS)
        write(shared, source, first_half=False)

    try:
        SingleCopyBridge.sync(bridge, 0, lambda: shared.load_state_dict(models[0].state_dict()))
        with requests.running():
            for version in range(1, updates + 1):
                requests.wait_for_more(1)
                bridge.sync(version, lambda source=models[version % 2]: write_slowly(source))  # type: ignore[misc]
            requests.wait_for_more(1)
    finally:
        bridge.close()

    torn = wrong = spanning = 0
    for answer in requests.answers:
        difference = differences(answer, models)
        torn += int((difference.amin(0) > TOLERANCE).sum())
        spans = answer["weight_version_spans"][0]
        spanning += len(spans) > 1
        versions = torch.tensor([version for version, count in spans for _ in range(count)])
        mine = difference.gather(0, (versions % 2)[None])[0]
        wrong += int((mine > TOLERANCE).sum())
        assert int((difference > 0.01).any(0).sum()) > difference.shape[1] // 2, "the two sets of weights must be far apart"
    if fenced:
        assert (torn, wrong) == (0, 0)
        assert spanning >= 1, "requests must be under way while the weights change"
    else:
        assert torn > 0
