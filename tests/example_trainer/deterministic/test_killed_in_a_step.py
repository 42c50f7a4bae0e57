"""A trainer in deterministic mode that is killed by SIGKILL in the middle of a step ends with the
weights of a trainer that was not, after the same rollouts.

Trainer, rollout service, environment and bridge are the real ones. The server is a light one, which
samples with the trainer's own forward pass on a CPU (tests/exact_sampler.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from example_trainer.launcher import roles
from tests.conftest import Processes
from tests.light_servers import SOON, LightServer, Starter, until
from tests.still_running import json_rows

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

STEPS, GROUP, GROUPS, LENGTH = 3, 4, 2, 5
DEATHS = [("comparing", 4), ("sending", 2), ("saving", 1)]
"""Places where a trainer dies, one after the other, and how often it comes there first."""
SINGLE_DEATHS = [("comparing", 4), ("committing", 2), ("saving", 1)]
"""Places of a trainer that sends nothing."""


class Asking(BaseEnv):
    """Items are numbers; a group's answers are the server's, and the score depends on them."""

    name = "asking"

    def __init__(self, url: str, server: LightServer) -> None:
        settings: dict[str, Any] = {
            "group_size": GROUP,
            "rollout_server_url": url,
            "steps_per_eval": 0,
            "tokenizer_name": "none",
        }
        config = BaseEnvConfig(
            exact_resume=True, max_token_length=8, service_timeout=60, **settings
        )
        super().__init__(config, [APIServerConfig(base_url="http://localhost:9")])
        self.sampler = server
        self.tokenizer = "none"
        self.server.wait_until_well = self.no_servers  # type: ignore[method-assign,assignment]

    async def setup(self) -> None:
        self.next = 0
        self.http = httpx.AsyncClient(timeout=SOON, trust_env=False, verify=False)

    async def get_next_item(self) -> int:
        self.next += 1
        return self.next - 1

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to measure."""

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        await asyncio.sleep(random.uniform(0, 0.02))  # in no order
        prompt = [item % 61, 1]
        body = {"prompt": prompt, "count": GROUP, "length": LENGTH, "seed": self.sampling_seed()}
        answer = (await self.http.post(f"{self.sampler.url}/test/sample", json=body)).json()
        rows = answer["tokens"]
        return {
            "tokens": [[*prompt, *row] for row in rows],
            "masks": [[-100, -100, *row] for row in rows],
            "scores": [float(sum(row) % 2) for row in rows],
            "inference_logprobs": [[1.0, 1.0, *row] for row in answer["logprobs"]],
            "weight_versions": [answer["version"]] * GROUP,
            "weight_epochs": [answer["epoch"]] * GROUP,
        }, []

    async def no_servers(self) -> None:
        """There are none to wait for."""


@contextlib.contextmanager
def environment(url: str, server: LightServer) -> Iterator[None]:
    """Run an environment in a thread, for the time of the block."""
    started: list[Any] = []
    ready = threading.Event()

    async def serve() -> None:
        started.extend([asyncio.get_running_loop(), asyncio.current_task()])
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await Asking(url, server).env_manager()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="environment")
    thread.start()
    assert ready.wait(SOON)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # it has come to its end
            started[0].call_soon_threadsafe(started[1].cancel)
        thread.join(SOON)
        assert not thread.is_alive()


class Stack:
    """A run's light server, and its rollout service."""

    def __init__(self, processes: Processes, starter: Starter, model: Path, flag: str) -> None:
        self.processes, self.starter, self.model, self.flag = processes, starter, model, flag

    def run(self, name: str, free_port: Callable[[], int], deaths: list[tuple[str, int]]) -> str:
        """Train to the end, and die on the way. Returns the digest of the last weights, with the
        figures of each step.
        """
        folder = self.starter.folder / name
        folder.mkdir()
        server = LightServer(self.starter, free_port(), model=self.model, samples=True)
        server.start()
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        store = folder / "rollouts.db"
        service = self.processes.start("service", roles.service("127.0.0.1", port, store=store))
        self.processes.wait_for_http(url, 180)
        words = self.words(url, folder, server)
        with environment(url, server):
            for number, (place, passes) in enumerate(deaths):
                resume = ["--resume", "auto"] if number else []
                assert self.train(folder, [*words, *resume], dies=place, passes=passes) == -9
                # An update of a dead trainer ends when the server has noticed the death.
                until(lambda: server.state()["target_version"] is None)
            resume = ["--resume", "auto"] if deaths else []
            log = folder / "trainer.log"
            assert self.train(folder, [*words, *resume]) == 0, log.read_text()[-3000:]
        self.processes.stop(service)
        server.kill()
        return self.learned(folder)

    def words(self, url: str, folder: Path, server: LightServer) -> list[str]:
        options = {
            "model-name": self.model, "atropos-url": url, "training-steps": STEPS, "lr": 1e-2, "seq-len": 64,
            "batch-size": GROUP * GROUPS, "gradient-accumulation-steps": 1, "num-threads": 1, "device": "cpu",
            "save-path": folder / "checkpoints", "log-dir": folder / "logs", "checkpoint-interval": 1,
            "weight-bridge-mode": "shared_vllm", "vllm-servers": f"127.0.0.1:{server.port}", "batch-timeout": 60,
            "tokens-per-microbatch": 24,
        }  # fmt: skip
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*flags, "--deterministic", self.flag]

    def train(self, folder: Path, words: list[str], **death: Any) -> int:
        """Run one trainer. Returns its exit status."""
        told = {"do": "grpo", "arguments": words, "folder": str(folder), **death}
        pid = self.starter.tell(**told)["pid"]
        return int(self.starter.tell(do="wait", pid=pid)["status"])

    def learned(self, folder: Path) -> str:
        rows = {row["weight_version"]: row for row in json_rows(folder / "logs" / "metrics.jsonl")}
        assert rows.keys() == set(range(1, STEPS + 1))
        figures = ("weights_sha", "reward_mean", "compared_tokens", "mismatched_tokens")
        steps = [[rows[step][name] for name in figures] for step in sorted(rows)]
        assert all(compared and not mismatched for _, _, compared, mismatched in steps)
        assert len({sha for sha, *_ in steps}) == STEPS
        weights = folder / "checkpoints" / f"step_{STEPS}" / "model.safetensors"
        return f"{steps} {hashlib.sha256(weights.read_bytes()).hexdigest()}"


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    one = Starter(tmp_path_factory.mktemp("killed"))
    yield one
    one.close()


@pytest.mark.parametrize(
    ("flag", "deaths"),
    [("--use-shared-memory", DEATHS), ("--single-copy", SINGLE_DEATHS)],
)
def test_a_trainer_that_is_killed_in_a_step_ends_with_the_same_weights(
    processes: Processes,
    starter: Starter,
    model: Path,
    free_port: Callable[[], int],
    flag: str,
    deaths: list[tuple[str, int]],
) -> None:
    stack = Stack(processes, starter, model, flag)
    whole = stack.run(f"whole{flag}", free_port, [])
    assert stack.run(f"killed{flag}", free_port, deaths) == whole
