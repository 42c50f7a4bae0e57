"""No token is sampled from half-written weights, or from others than were announced, while requests
are under way.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.models.decoder import Decoder
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.base import SyncReport, Weights
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.e2e.bridge_helpers import joined, new_weights, served_logprobs, trainer_logprobs
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

STREAMS = 3
LENGTH = 450
TOLERANCE = 1e-3
"""Largest difference of a served logprob to the forward pass that it came from; the sets of weights
here are further apart."""


class UnfencedBridge(SingleCopyBridge):
    """A single copy without the pause: written while the server samples."""

    def _update(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        write_weights()
        return SyncReport(version=version, checksum="", bytes_moved=0)


class Requests:
    """Completions of random prompts and lengths, one after another in each of a few threads."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._problems: list[BaseException] = []
        self.answers: list[dict[str, list]] = []  # type: ignore[type-arg]
        self._threads = [
            threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(STREAMS)
        ]

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._stop.is_set():
                prompt = [rng.randrange(256) for _ in range(rng.randint(2, 20))]
                options = {
                    "max_tokens": rng.randint(8, 96),
                    "seed": rng.randrange(10**6),
                    "ignore_eos": True,
                }
                self.answers.append(self._server.generate(prompt, **options))
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self._problems.append(error)

    def wait_for_more(self, count: int) -> None:
        """Return when `count` requests more than now have been answered."""
        target, deadline = len(self.answers) + count, time.monotonic() + 120
        while len(self.answers) < target:
            if self._problems:
                raise self._problems[0]
            assert time.monotonic() < deadline, (
                f"only {len(self.answers)} of {target} requests were answered"
            )
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
                thread.join(120)
        assert not self._problems, self._problems[0]


def write(model: Decoder, source: Decoder, first_half: bool) -> None:
    """Copy every other parameter, or the rest, into the memory that `model` shares with the server."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if (number % 2 == 0) == first_half:
                parameter.copy_(source.get_parameter(name))


def differences(answer: dict[str, list], models: list[Decoder]) -> torch.Tensor:  # type: ignore[type-arg]
    """[models, tokens]: |served logprob - the model's own| of each token of a completion, in
    float32.
    """
    prompt, tokens = answer["prompt_token_ids"], answer["token_ids"][0]
    served = torch.tensor(
        [row[str(token)] for row, token in zip(answer["logprobs"][0], tokens, strict=True)]
    )
    rows = []
    for model in models:
        with torch.no_grad():
            table = model.logits(torch.tensor([prompt + tokens]))[
                0, len(prompt) - 1 : -1
            ].log_softmax(-1)
        rows.append((table.gather(1, torch.tensor(tokens)[:, None])[:, 0] - served).abs())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("fenced", "updates"), [(True, 5), (False, 2)]
)  # and more until one has fallen into a request
def test_a_token_comes_from_one_set_of_weights(
    server: VllmServer, fenced: bool, updates: int
) -> None:
    """With the pause, every token comes from the old or the new weights, as its version shows;
    without it, some come from neither.
    """
    models = [load_model(str(server.model), torch.float32) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    bridge = (SingleCopyBridge if fenced else UnfencedBridge)(
        BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)
    )
    shared = load_model(str(server.model), torch.float32)
    bridge.connect(shared)
    requests = Requests(server)

    def write_slowly(source: Decoder) -> None:
        write(shared, source, first_half=True)
        if fenced:
            time.sleep(0.3)  # nothing is answered now, so there is nothing else to wait for
        else:
            requests.wait_for_more(STREAMS + 1)  # one of them was begun after the first half
        write(shared, source, first_half=False)

    try:
        SingleCopyBridge.sync(bridge, 0, lambda: shared.load_state_dict(models[0].state_dict()))
        with requests.running():
            for version in range(1, 10 * updates):
                requests.wait_for_more(1)
                bridge.sync(version, lambda source=models[version % 2]: write_slowly(source))  # type: ignore[misc]
                crossed = any(
                    len(spans) > 1
                    for answer in requests.answers
                    for spans in answer["weight_version_spans"]
                )
                if version >= updates and (crossed or not fenced):
                    break
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
        assert int((difference > 0.01).any(0).sum()) > difference.shape[1] // 2, (
            "the two sets of weights must be far apart"
        )
    if fenced:
        assert (torn, wrong) == (0, 0)
        assert spanning >= 1, "requests must be under way while the weights change"
    else:
        assert torn > 0


def sampled_so_far(server: VllmServer) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=120).text
    found = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    assert found, "vLLM counts its tokens under another name"
    return sum(map(float, found))


def test_the_engine_does_not_go_on_with_weights_that_were_not_announced(
    server: VllmServer, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [10, 20, 30]
    with joined(server, "single_copy", free_port, monkeypatch) as (bridge, model):
        for version in range(
            1, 6
        ):  # on a busy machine the request may have ended before the update begins
            old = load_model(str(server.model), torch.float32)
            old.load_state_dict(
                {name: tensor.clone() for name, tensor in model.state_dict().items()}
            )
            wrong = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
            answers: list[dict[str, list]] = []  # type: ignore[type-arg]

            def generate(into: list[dict[str, list]] = answers) -> None:  # type: ignore[type-arg]
                into.append(server.generate(prompt, max_tokens=LENGTH, seed=3, ignore_eos=True))

            before = sampled_so_far(server)
            thread = threading.Thread(target=generate)
            thread.start()
            deadline = time.monotonic() + 120
            while sampled_so_far(server) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(
                BridgeError,
                match=r"rank 0 received checksum \w+ of version \d, the trainer's is \w+",
            ):
                bridge.sync(version, new_weights(model, version), wrong)
            assert server.state()["state"] == "unhealthy"
            counts = [-1.0, sampled_so_far(server)]
            while (
                counts[-1] != counts[-2]
            ):  # what was sampled before is handed out now; an engine that ran would go on
                time.sleep(0.5)
                counts.append(sampled_so_far(server))
            stopped = counts[-1] < before + LENGTH
            bridge.sync(version, new_weights(model, version + 100))
            thread.join(120)
            (answer,) = answers
            if not stopped:
                continue
            (spans,) = answer["weight_version_spans"]
            assert [number for number, _ in spans] == [version - 1, version]
            assert sum(count for _, count in spans) == len(answer["token_ids"][0]) == LENGTH
            served, cut = served_logprobs(answer, 0), spans[0][1]
            tokens = answer["token_ids"][0]
            assert (served - trainer_logprobs(old, prompt, tokens))[:cut].abs().max() < TOLERANCE
            assert (served - trainer_logprobs(model, prompt, tokens))[cut:].abs().max() < TOLERANCE
            return
    pytest.fail(
        "the request always came to its end: no update fell into it, or the engine went on with refused weights"
    )
