"""The whole stack twice with the same seed: the same rollouts, and after each step the same weights, bit for bit.

Deterministic mode's kernels need a GPU. Here vLLM computes one sequence at a time, so that nothing depends on what else is in a
batch; what is tested is the rest: problems, seeds, which groups make up a batch, and the order in which they are trained on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Processes
from tests.e2e.conftest import VllmServer, start_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(800)]

STARTER = ROOT / "assets" / "starter_model"
STEPS = 4


@pytest.fixture(scope="module")
def one_at_a_time(
    module_processes: Processes, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> VllmServer:
    flags = ("--max-num-seqs", "1", "--no-enable-prefix-caching", "--max-model-len", "256", "--enforce-eager")
    return start_vllm(module_processes, free_port, STARTER, tmp_path_factory.mktemp("vllm"), flags=flags)


def train(
    name: str, vllm: VllmServer, processes: Processes, free_port: Callable[[], int], folder: Path, *environment: str
) -> list[tuple[str, float, int]]:
    """(checksum of the weights, mean reward, tokens) of each step."""
    port, out = free_port(), folder / name
    service = f"http://127.0.0.1:{port}"
    processes.start(
        f"service {name}", [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(port), "--store", "memory"]
    )
    processes.wait_for_http(service, seconds=60)
    trainer = processes.start(
        f"trainer {name}",
        [
            sys.executable, "-u", ROOT / "example_trainer/grpo.py", "--model-name", STARTER, "--weight-bridge-mode",
            "shared_vllm", "--single-copy", "--vllm-port", str(vllm.port), "--atropos-url", service, "--training-steps",
            str(STEPS), "--batch-size", "4", "--gradient-accumulation-steps", "4", "--lr", "1e-3", "--seq-len", "256",
            "--max-staleness", "0", "--num-threads", "1", "--save-path", out / "checkpoints", "--log-dir", out / "logs",
            "--checkpoint-interval", "0",
        ],
        {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    processes.start(
        f"environment {name}",
        [
            sys.executable, ROOT / "environments/arithmetic_server.py", "serve", "--env.rollout_server_url", service,
            "--env.group_size", "4", "--env.max_token_length", "24", "--env.max_batches_offpolicy", "0",
            "--openai.base_url", f"http://localhost:{vllm.port}", "--openai.server_type", "vllm", *environment,
        ],
        may_finish=True,
    )  # fmt: skip
    processes.finish(trainer, seconds=240)
    rows = [json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == list(range(1, STEPS + 1))
    return [(row["checksum"], row["reward_mean"], row["tokens"]) for row in rows]


def test_a_run_repeats(one_at_a_time: VllmServer, processes: Processes, free_port: Callable[[], int], tmp_path: Path) -> None:
    seeded = ("--env.seed_rollouts", "true")
    first = train("first", one_at_a_time, processes, free_port, tmp_path, *seeded)
    again = train("again", one_at_a_time, processes, free_port, tmp_path, *seeded)
    unseeded = train("unseeded", one_at_a_time, processes, free_port, tmp_path)
    assert again == first
    assert len({checksum for checksum, *_ in first}) == STEPS
    assert unseeded[0] != first[0], "if any two runs were equal, this would prove nothing"
