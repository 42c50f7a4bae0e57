"""The code environment through the real stack: an evaluation, then two steps. The starter model has never seen code, and solves
nothing; with credit for form it still has something to learn, and every part works as it would with a model that can."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

STARTER = ROOT / "assets" / "starter_model"
STEPS = 2


def test_programs_of_a_real_model_are_run_and_trained_on(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    server = start_vllm(processes, free_port, STARTER, tmp_path)
    port = free_port()
    service = processes.start("service", [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(port), "--new-run"])
    processes.wait_for_http(f"http://localhost:{port}/", 60)
    metrics = tmp_path / "code.jsonl"
    environment = processes.start(
        "code",
        [
            *(sys.executable, ROOT / "environments/code_server.py", "serve", "--openai.base_url", server.url),
            *("--env.rollout_server_url", f"http://localhost:{port}", "--env.max_token_length", "24"),
            *("--env.format_reward", "1.0", "--env.eval_size", "8", "--env.steps_per_eval", "1", "--env.metrics_path", metrics),
        ],
        may_finish=True,
    )
    trainer = processes.start(
        "trainer",
        [
            *(sys.executable, "-u", ROOT / "example_trainer/grpo.py", "--model-name", STARTER),
            *("--weight-bridge-mode", "shared_vllm", "--single-copy", "--vllm-port", str(server.port)),
            *("--atropos-url", f"http://localhost:{port}", "--lr", "1e-4", "--training-steps", str(STEPS)),
            *("--batch-size", "8", "--gradient-accumulation-steps", "1"),
            *("--save-path", tmp_path / "checkpoints", "--log-dir", tmp_path / "trainer"),
        ],
    )
    processes.finish(trainer, 240)
    processes.finish(environment, 120)
    rows = [json.loads(line) for line in (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(-1 <= row["reward_mean"] < 1 for row in rows)
    noted = [json.loads(line) for line in metrics.read_text().splitlines()]
    crashed = [row["train/code_crash"] for row in noted if "train/code_crash" in row]
    assert crashed, "no program was run"
    assert max(crashed) > 0.5, "what the starter model writes is no Python"
    log = environment.log_path.read_text()
    assert "evaluation of code: " in log
    assert "Traceback" not in log
    assert service.poll() is None
