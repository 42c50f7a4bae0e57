"""An environment that the verifiers package ships, through the real stack: its rollouts and
rewards, our tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from example_trainer.launcher import roles
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm, trainer_command

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(480)]

PYTHON = os.environ.get("LOCKSTEP_VERIFIERS_PYTHON", "")
STARTER = ROOT / "assets" / "starter_model"
STEPS = 3
GROUP = 8


def test_three_training_steps(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    if not PYTHON:
        pytest.skip(
            "LOCKSTEP_VERIFIERS_PYTHON names no interpreter that has the verifiers package (docs/environments.md)"
        )
    has = subprocess.run(
        [PYTHON, "-c", "import verifiers, reasoning_gym"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if has.returncode:
        pytest.skip(f"{PYTHON} has no verifiers[rg]: {has.stderr.strip().splitlines()[-1]}")
    server = start_vllm(processes, free_port, STARTER, tmp_path)
    port = free_port()
    service = processes.start_service(port)
    result = tmp_path / "evaluation.json"
    url = f"http://localhost:{port}"
    words = roles.environment(
        "verifiers",
        url,
        [f"{server.url}/v1"],
        settings={
            "environment": ROOT / "tests/e2e/verifiers_tasks.py",
            "max_token_length": 32,
            "group_size": GROUP,
            "steps_per_eval": STEPS,
            "eval_output": result,
            "metrics_path": tmp_path / "metrics.jsonl",
        },
        python=PYTHON,
    )
    environment = processes.start("verifiers", words, may_finish=True)
    command = trainer_command(
        STARTER,
        url,
        tmp_path,
        vllm_port=server.port,
        lr=1e-4,
        training_steps=STEPS,
        batch_size=2 * GROUP,
        gradient_accumulation_steps=2,
    )
    trainer = processes.start("trainer", command)
    processes.finish(trainer, 240)
    processes.finish(environment, 120)
    rows = [
        json.loads(line)
        for line in (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["grad_norm"] > 0 for row in rows)
    assert server.state()["weight_version"] == STEPS
    noted = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("train/items_sent_to_api", 0) for row in noted) >= 2 * STEPS
    rewards = [
        row["train/check_answer_reward_func"]
        for row in noted
        if "train/check_answer_reward_func" in row
    ]
    assert any(0 < reward < 1 for reward in rewards), (
        "of answers that were right and others that were not"
    )
    assert json.loads(result.read_text())["num_problems"] == 4
    assert "Traceback" not in environment.log_path.read_text()
    assert service.poll() is None
