"""The code and the judge environment through the real stack, in one run. The starter model has never seen code, and solves
nothing; with credit for form, and a judge that likes every second answer, it still has something to learn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm
from tests.environments.standin_judge import judging

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

STARTER = ROOT / "assets" / "starter_model"
STEPS = 2
GROUP = 4


def test_both_are_trained_on(processes: Processes, free_port: Callable[[], int], tmp_path: Path) -> None:
    server = start_vllm(processes, free_port, STARTER, tmp_path)
    port = free_port()
    service = processes.start("service", [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(port), "--new-run"])
    processes.wait_for_http(f"http://localhost:{port}/", 60)

    def environment(name: str, *flags: str) -> list[str | Path]:
        return [
            *(sys.executable, ROOT / f"environments/{name}_server.py", "serve", "--openai.base_url", f"{server.url}/v1"),
            *("--env.rollout_server_url", f"http://localhost:{port}", "--env.max_token_length", "24", "--env.eval_size", "4"),
            *("--env.group_size", str(GROUP), "--env.min_batch_allocation", "0.5", "--env.steps_per_eval", "1"),
            *("--env.metrics_path", tmp_path / f"{name}.jsonl", *flags),
        ]

    with judging() as judge:
        judge.says = ["Score: 2", "Score: 8"] * 1000
        running = [
            processes.start("code", environment("code", "--env.format_reward", "1.0"), may_finish=True),
            processes.start("judge", environment("judge", "--env.judge_url", judge.url), may_finish=True),
        ]
        trainer = processes.start(
            "trainer",
            [
                *(sys.executable, "-u", ROOT / "example_trainer/grpo.py", "--model-name", STARTER),
                *("--weight-bridge-mode", "shared_vllm", "--single-copy", "--vllm-port", str(server.port)),
                *("--atropos-url", f"http://localhost:{port}", "--lr", "1e-4", "--training-steps", str(STEPS)),
                *("--batch-size", str(4 * GROUP), "--gradient-accumulation-steps", "2"),
                *("--save-path", tmp_path / "checkpoints", "--log-dir", tmp_path / "trainer"),
            ],
        )
        processes.finish(trainer, 240)
        for process in running:
            processes.finish(process, 120)
        assert judge.asked
    rows = [json.loads(line) for line in (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in rows)
    for name, process in zip(("code", "judge"), running, strict=True):
        noted = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        # Half of each batch is reserved for each.
        assert sum(row.get("train/items_sent_to_api", 0) for row in noted) >= 2 * STEPS
        log = process.log_path.read_text()
        assert f"evaluation of {name}: " in log
        assert "Traceback" not in log
        if name == "code":
            assert max(row.get("train/code_crash", 0) for row in noted) > 0.5, "what the starter model writes is no Python"
    assert service.poll() is None
