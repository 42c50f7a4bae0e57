"""Real reference workers and the real rollout service. One worker is killed and one is stopped
(SIGSTOP), both with groups that they have leased. The service is restarted.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from example_trainer.batch.client import RolloutClient
from example_trainer.batch.groups import Rules, parse_batch
from example_trainer.batch.packing import pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.launcher import roles
from example_trainer.models import Decoder, load_model
from example_trainer.process import StopSignal
from example_trainer.training.reference import ReferenceSettings
from example_trainer.training.step import response_logprobs
from tests.conftest import Processes
from tests.example_trainer.batch.registration import REGISTRATION
from tests.http_server import Answer, HttpServer, Request

pytestmark = pytest.mark.nightly

MODEL = Path(__file__).resolve().parents[2] / "assets" / "starter_model"
GROUPS, SIZE, LENGTH = 4, 2, 120
CONFIG = TrainerConfig(model_name=str(MODEL), seq_len=512, share_prefixes=False)
WAIT = 120.0


def groups() -> list[dict[str, Any]]:
    rng, made = random.Random(0), []
    for _ in range(GROUPS):
        prompt = [rng.randrange(1024) for _ in range(5)]
        answers = [[rng.randrange(1024) for _ in range(LENGTH)] for _ in range(SIZE)]
        made.append(
            {
                "tokens": [prompt + answer for answer in answers],
                "masks": [[-100] * 5 + answer for answer in answers],
                "scores": [1.0, 0.0],
                "sampling_params": [{"temperature": 1.0}, None],
            }
        )
    return made


def trainers_own(model: Decoder, batch: list[dict[str, Any]]) -> dict[tuple[int, int], bytes]:
    """The bits that the trainer would compute, all groups in one pass."""
    (((bin,),),) = pack_batch(
        parse_batch(batch, 512, 1024), tokens_per_bin=10**6, ranks=1, normalisation="token", max_tokens=512,
        share_prefixes=False,
    )  # fmt: skip
    with torch.no_grad():
        found, _ = response_logprobs(model, bin, CONFIG)
    rows = zip(bin.orders.tolist(), found.split(bin.counts.tolist()), strict=True)
    return {(group, i): row.numpy().tobytes() for (group, i), row in rows}


def worker_command(url: str, name: str, model: Path = MODEL) -> list[str]:
    return roles.reference_worker(str(model), url, deterministic=True, name=name, lease_seconds=3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def gate(url: str, held: set[str], opened: threading.Event) -> HttpServer:
    """Stand before the service, and hold what workers hand back until the gate is opened."""

    def forward(request: Request) -> Answer:
        if request.path == "/reference/done" and not opened.is_set():
            held.add(request.json["worker"])
            opened.wait(WAIT)
        kind = {"Content-Type": "application/json"}
        try:
            answer = httpx.request(
                request.method, url + request.path, content=request.body, headers=kind, timeout=WAIT
            )
        except httpx.HTTPError:
            return None
        return answer.status_code, answer.json()

    return HttpServer(forward)


def wishes(model: Any) -> Any:
    """The registration of a trainer that leaves its reference to workers."""
    reference = ReferenceSettings.of(CONFIG, model).for_the_wire()
    wants = replace(REGISTRATION, batch_size=GROUPS * SIZE, max_token_len=512, model=str(MODEL))
    return replace(wants, ref_logprobs_from_workers=True, reference=reference)


def bits_of(parsed: Any) -> dict[Any, bytes]:
    """The reference's bits of each sequence that has them."""
    return {
        s.order: s["reference_logprobs"].tobytes()
        for s in parsed.sequences
        if "reference_logprobs" in s.fields
    }


def test_every_group_gets_the_trainers_own_bits_whoever_dies(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path, stack: ExitStack
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    service_command = roles.service("127.0.0.1", port, store=tmp_path / "s.db")

    def start_service() -> Any:
        started = processes.start("service", service_command)
        processes.wait_for_http(f"{url}/", seconds=180)
        return started

    worker = partial(worker_command, url)

    def seen() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{url}/reference", timeout=60).raise_for_status().json()
        return found

    service = start_service()
    (tmp_path / "other").symlink_to(MODEL)
    told = ["sh", "-c", f'{shlex.join(worker("other", tmp_path / "other"))}; echo "status $?"']
    other = processes.start("other", told, may_finish=True)
    held, opened = set[str](), threading.Event()
    closed = partial(worker_command, stack.enter_context(gate(url, held, opened)).url)
    doomed, halted = (processes.start(name, closed(name)) for name in ("doomed", "halted"))
    model = load_model(str(MODEL), torch.float32, "cpu", deterministic_decoder)
    client = RolloutClient(url, StopSignal(), service_timeout=60, batch_timeout=WAIT)
    client.register(wishes(model))
    httpx.post(f"{url}/scored_data_list", json=groups(), timeout=60).raise_for_status()

    processes.wait_until(
        "work of both", lambda: None if len(held) == 2 else f"{held}: {seen()}", WAIT
    )
    os.kill(halted.command_pid(), signal.SIGSTOP)
    processes.kill(doomed)
    assert seen()["answered"] == 0
    one, two = (processes.start(name, worker(name)) for name in ("one", "two"))
    processes.wait_until(
        "an answer of another worker",
        lambda: None if seen()["answered"] else f"none: {seen()}",
        WAIT,
    )
    processes.kill(service)
    start_service()
    batch = client.next_batch()
    parsed = parse_batch(batch.groups, 512, 1024, Rules(reference="required"))
    assert (parsed.invalid, len(parsed.sequences)) == ([], GROUPS * SIZE)
    found = bits_of(parsed)
    assert found == trainers_own(model, batch.groups)
    assert processes.stop(one) == 128 + 15
    assert "Stopped by SIGTERM" in one.log_path.read_text()
    processes.stop(two)
    # Others have answered what it had; from here on it works alone.
    opened.set()
    os.kill(halted.command_pid(), signal.SIGCONT)
    client.acknowledge(batch.lease, 1)
    httpx.post(f"{url}/scored_data_list", json=groups(), timeout=60).raise_for_status()
    second = parse_batch(client.next_batch().groups, 512, 1024, Rules(reference="required"))
    assert bits_of(second) == found
    client.close()
    expect_refusal(processes.finish(other, 180), tmp_path / "other")


def expect_refusal(said: str, model: Path) -> None:
    """Expect the one line of a worker with another model than the trainer's."""
    assert "status 2" in said
    (line,) = [line for line in said.splitlines() if line.startswith("ERROR")]
    assert f"has the model '{model}', but the trainer's reference is '{MODEL}'" in line
