"""A run whose trainer, environment and rollout service are killed, at each point of the loop,
learns what an unhurt one learns.

Trainer, service and environment are the real ones. In place of vLLM a few lines answer with tokens
that are a function of the weights and of the request's seed. The test does not control their order.
The trainer dies as in in_process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from example_trainer import grpo
from example_trainer.batch.client import RolloutClient
from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.command_line import parse_config
from example_trainer.launcher import roles
from example_trainer.process import StopSignal
from example_trainer.training import assembly, trainer
from example_trainer.training import checkpoints as checkpointing
from example_trainer.weight_bridge.base import NoBridge
from tests.conftest import Processes
from tests.example_trainer.in_process import Killed
from tests.example_trainer.test_grpo import small_flags

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

STEPS, GROUP, GROUPS = 12, 4, 3
POINTS = {
    "stepped": (trainer, "guarded_step", False),
    "registered": (RolloutClient, "register", False),
    "synced": (NoBridge, "sync", False),
    "begun": (checkpointing.Checkpoints, "begin", False),
    "writing": (checkpointing, "put_in_place", True),
    "written": (checkpointing, "put_in_place", False),
    "acknowledging": (RolloutClient, "acknowledge", True),
    "acknowledged": (RolloutClient, "acknowledge", False),
}
"""Where a trainer may die: at a function's beginning (True) or end."""


@dataclass(frozen=True)
class Served:
    """The weights that answer now."""

    epoch: int = 0
    version: int = 0
    digest: str = ""


class Sampler(BaseEnv):
    """Items are numbers.

    A group's tokens depend on the weights and on the item's seed; about a third teaches nothing.
    """

    name = "sampler"

    def __init__(self, url: str, run: Run) -> None:
        settings = {
            "group_size": GROUP,
            "rollout_server_url": url,
            "steps_per_eval": 0,
            "tokenizer_name": "none",
        }
        config = BaseEnvConfig(
            exact_resume=True, max_token_length=8, service_timeout=60, **settings
        )
        super().__init__(config, [APIServerConfig(base_url="http://localhost:9")])
        self.run_of = run
        self.tokenizer = "none"
        self.server.wait_until_well = self.no_servers  # type: ignore[method-assign,assignment]
        self._runner._stop = self.die  # type: ignore[method-assign]

    async def setup(self) -> None:
        self.next = 0

    async def get_next_item(self) -> int:
        self.next += 1
        return self.next - 1

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to measure."""

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        before, pause = self.run_of.served, random.uniform(0, 0.02)
        await asyncio.sleep(pause)
        after = self.run_of.served
        # Samples from a change of weights belong to neither.
        digest = after.digest if before.digest == after.digest else f"{before} {after} {pause}"
        rng = random.Random(f"{digest} {item} {self.sampling_seed()}")
        rows = [[rng.randrange(61) for _ in range(rng.randint(2, 8))] for _ in range(GROUP)]
        return {
            "tokens": [[item % 61, *row] for row in rows],
            "masks": [[-100, *row] for row in rows],
            "scores": [1.0] * GROUP if rng.random() < 0.3 else [float(i % 2) for i in range(GROUP)],
            "inference_logprobs": [[1.0, *(-4.0 + rng.random() for _ in row)] for row in rows],
            "weight_versions": [before.version] * GROUP,
            "weight_epochs": [before.epoch] * GROUP,
        }, []

    async def die(self) -> None:
        """As SIGKILL: no other process gets a message."""
        for task in self.workers:
            task.cancel()

    async def no_servers(self) -> None:
        """There are none to wait for."""


class Run:
    """One run: its service, its trainers and its environments, one after the other."""

    def __init__(
        self,
        processes: Processes,
        port: int,
        model: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.processes, self.port, self.model, self.folder = processes, port, model, folder
        self.url = f"http://127.0.0.1:{port}"
        folder.mkdir()
        self.served = Served()
        self.learned: dict[int, list[Any]] = {}
        self.point, self.passes = "", 0
        self._environment: (
            tuple[asyncio.AbstractEventLoop, asyncio.Task[None], threading.Thread] | None
        ) = None
        self._watch(monkeypatch)
        self.service = self.start_service()

    def start_service(self) -> ManagedProcess:
        command = roles.service("127.0.0.1", self.port, store=self.folder / "rollouts.db")
        service = self.processes.start("service", command)
        self.processes.wait_for_http(self.url, 180)
        return service

    def kill_service(self) -> None:
        self.processes.kill(self.service)
        self.service = self.start_service()

    def start_environment(self) -> None:
        started: list[Any] = []
        ready = threading.Event()

        async def serve() -> None:
            started.extend([asyncio.get_running_loop(), asyncio.current_task()])
            ready.set()
            with contextlib.suppress(asyncio.CancelledError):
                await Sampler(self.url, self).env_manager()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="environment")
        thread.start()
        assert ready.wait(120)
        self._environment = (started[0], started[1], thread)

    def kill_environment(self) -> None:
        if self._environment is not None:
            event_loop, task, thread = self._environment
            with contextlib.suppress(RuntimeError):  # it has come to its end
                event_loop.call_soon_threadsafe(task.cancel)
            thread.join(120)
            assert not thread.is_alive()

    def train(self, interval: int, *options: str, point: str = "", passes: int = 1) -> bool:
        """Run one trainer to its end, or until it has passed a point so many times.

        Returns whether it came to its end.
        """
        self.point, self.passes = point, passes
        words = small_flags(self.model, self.url, self.folder, training_steps=STEPS)
        words += roles.flags(batch_size=GROUP * GROUPS, gradient_accumulation_steps=1)
        words += roles.flags(max_staleness=0, checkpoint_interval=interval)
        words += roles.flags(batch_timeout=120, service_timeout=120, device="cpu")
        try:
            grpo.train(parse_config([*words, *options]), StopSignal())
        except Killed:
            return False
        return True

    def outcome(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """The rollouts that the last weights have learned from, and those weights."""
        weights = load_file(self.folder / "checkpoints" / f"step_{STEPS}" / "model.safetensors")
        return [self.learned[step] for step in range(STEPS)], weights

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def passed(point: str) -> None:
            if point == self.point:
                self.passes -= 1
                if self.passes == 0:
                    raise Killed

        def watch(point: str, owner: Any, name: str, before: bool) -> None:
            real = getattr(owner, name)

            def watched(*arguments: Any, **options: Any) -> Any:
                if before:
                    passed(point)
                outcome = real(*arguments, **options)
                if not before:
                    passed(point)
                return outcome

            monkeypatch.setattr(owner, name, watched)

        make_bridge, sync, next_batch = (
            assembly.make_bridge,
            NoBridge.sync,
            RolloutClient.next_batch,
        )
        epoch = [0]

        def make_and_note(*arguments: Any, weight_epoch: int, **options: Any) -> Any:
            epoch[0] = weight_epoch
            return make_bridge(*arguments, weight_epoch=weight_epoch, **options)

        def serve(
            bridge: NoBridge, version: int, write: Callable[[], None], masters: Any = None
        ) -> Any:
            report = sync(bridge, version, write, masters)
            digest = hashlib.sha256(
                b"".join(tensor.detach().numpy().tobytes() for _, tensor in sorted(masters.items()))
            )
            self.served = Served(epoch[0], version, digest.hexdigest())
            return report

        def fetch(client: RolloutClient, *arguments: Any) -> Any:
            batch = next_batch(client, *arguments)
            said = ("tokens", "scores", "inference_logprobs", "stream_item", "weight_versions")
            rollouts = [[group[name] for name in said] for group in batch.groups]
            self.learned[batch.groups[0]["weight_versions"][0]] = rollouts
            return batch

        monkeypatch.setattr(assembly, "make_bridge", make_and_note)
        monkeypatch.setattr(NoBridge, "sync", serve)
        monkeypatch.setattr(RolloutClient, "next_batch", fetch)
        for point, (owner, name, before) in POINTS.items():
            watch(point, owner, name, before)


@pytest.fixture
def new_run(
    processes: Processes,
    free_port: Callable[[], int],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], Run]]:
    threads, runs = torch.get_num_threads(), []

    def make(name: str) -> Run:
        runs.append(Run(processes, free_port(), model, tmp_path / name, monkeypatch))
        return runs[-1]

    yield make
    for run in runs:
        run.kill_environment()
    torch.set_num_threads(threads)


def test_whoever_is_killed_and_wherever_the_weights_are_those_of_the_unhurt_run(
    new_run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context():
        whole = new_run("whole")
        whole.start_environment()
        assert whole.train(1)
        rollouts, weights = whole.outcome()
    monkeypatch.undo()

    hurt = new_run("hurt")
    hurt.start_environment()
    options: tuple[str, ...] = ()
    for number, point in enumerate(POINTS):
        # With a checkpoint every two steps, the steps acknowledged since the last one are sampled
        # and learned again.
        assert not hurt.train(
            1 + number % 2, *options, point=point, passes=1 + (number % 3 == 2)
        ), point
        options = ("--resume", "auto")
        if number % 2:
            hurt.kill_environment()
        if number % 3 == 1:
            hurt.kill_service()
        if number % 2:
            hurt.start_environment()
    assert hurt.train(1, *options)
    again, weights_again = hurt.outcome()
    assert again == rollouts
    assert weights_again.keys() == weights.keys()
    assert all(torch.equal(weights_again[name], tensor) for name, tensor in weights.items())
    assert len({str(group[0]) for groups in rollouts for group in groups}) == STEPS * GROUPS, (
        "else this proves little"
    )
