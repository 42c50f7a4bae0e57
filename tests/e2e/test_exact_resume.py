"""Runs of the whole stack that are the same run: after each step the same rollouts and the same
weights, bit for bit.

One run is repeated with the same seed, and one has every process killed by `kill -9` and is
resumed. Deterministic mode needs a GPU. Here vLLM computes one sequence at a time, so that nothing
depends on the rest of a batch. Tested are problems, seeds, the groups of a batch, and the order in
which they are trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher import roles
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import VllmServer, start_vllm, trainer_command
from tests.still_running import json_rows

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(900)]

STARTER = ROOT / "assets" / "starter_model"
STEPS = 2
FLAGS = (
    "--max-num-seqs",
    "1",
    "--no-enable-prefix-caching",
    "--max-model-len",
    "256",
    "--enforce-eager",
)
SEEDED = ("--env.seed_rollouts", "true", "--env.max_batches_offpolicy", "0")
EXACT = ("--env.exact_resume", "true")


@dataclass
class Stack:
    """The four processes of one run."""

    processes: Processes
    vllm: VllmServer
    port: int
    folder: Path
    environment_flags: tuple[str, ...]
    steps: int = STEPS

    def start(self, *resume: str) -> None:
        service = f"http://127.0.0.1:{self.port}"
        store = self.folder / "rollouts.db"
        self.service = self.processes.start(
            "service", roles.service("127.0.0.1", self.port, store=store)
        )
        self.processes.wait_for_http(service, seconds=180)
        command = trainer_command(
            STARTER,
            service,
            self.folder,
            *resume,
            lr=1e-3,
            vllm_port=self.vllm.port,
            training_steps=self.steps,
            batch_size=8,
            seq_len=256,
            gradient_accumulation_steps=2,
            max_staleness=0,
            num_threads=1,
            log_dir=self.folder / "logs",
            checkpoint_interval=1,
            keep_checkpoints=1,
        )
        self.trainer = self.processes.start(
            "trainer", command, {"OMP_NUM_THREADS": "1"}, may_finish=True
        )
        words = roles.environment(
            "arithmetic",
            service,
            [f"http://localhost:{self.vllm.port}"],
            settings={"group_size": 4, "max_token_length": 24},
        )
        self.environment = self.processes.start(
            "environment", [*words, *self.environment_flags], may_finish=True
        )

    def kill(self) -> None:
        everyone: list[ManagedProcess] = [
            self.service,
            self.environment,
            self.trainer,
            self.vllm.process,
        ]
        for process in everyone:
            self.processes.kill(process)

    def learned(self) -> dict[int, tuple[str, float, int]]:
        """Return the checksum of the present weights, the mean reward and the tokens of each
        step.
        """
        rows = json_rows(self.folder / "logs" / "metrics.jsonl")
        return {
            row["weight_version"]: (row["checksum"], row["reward_mean"], row["tokens"])
            for row in rows
        }

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(
            f"http://127.0.0.1:{self.port}/stats", timeout=120
        ).json()
        return answer

    def finish(self) -> tuple[dict[int, tuple[str, float, int]], str]:
        """Return the learned steps, and the digest of the last checkpoint's weights."""
        self.processes.finish(self.trainer, seconds=240)
        for process in (self.environment, self.service):
            self.processes.stop(process)
        assert self.learned().keys() == set(range(1, self.steps + 1))
        weights = (
            self.folder / "checkpoints" / f"step_{self.steps}" / "model.safetensors"
        ).read_bytes()
        return self.learned(), hashlib.sha256(
            weights
        ).hexdigest()  # pytest would look for minutes where megabytes differ


def test_runs_of_one_seed_are_the_same_killed_or_not(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    vllm = start_vllm(processes, free_port, STARTER, tmp_path, flags=FLAGS)

    def stack(name: str, *flags: str, steps: int = STEPS) -> Stack:
        made = Stack(processes, vllm, free_port(), tmp_path / name, flags, steps)
        made.folder.mkdir()
        made.start()
        return made

    expected = stack("whole", *EXACT).finish()
    learned = expected[0]
    assert len({checksum for checksum, *_ in learned.values()}) == STEPS
    again, _ = stack("again", *SEEDED, steps=2).finish()
    assert again == {step: learned[step] for step in again}, (
        "the order is kept too, but nothing was killed"
    )
    unseeded, _ = stack("unseeded", *SEEDED[2:], steps=1).finish()
    assert unseeded[1] != learned[1], "if any two runs were equal, this would prove nothing"

    killed = stack("killed", *EXACT)

    # When a step has been taken, and a part of the next batch is at the service while the rest of
    # it is being sampled.
    def half_a_batch() -> str | None:
        stats = killed.stats()
        there = (
            stats["trainer_version"] >= 1
            and 0 < stats["queue"]["groups"] < 4
            and not stats["leases"]
        )
        return None if there else f"version {stats['trainer_version']}, {stats['queue']}"

    processes.wait_until("half a batch", half_a_batch, 180)
    killed.kill()
    killed.vllm = start_vllm(processes, lambda: vllm.port, STARTER, tmp_path, flags=FLAGS)
    killed.start("--resume", "auto")
    assert killed.finish() == expected
