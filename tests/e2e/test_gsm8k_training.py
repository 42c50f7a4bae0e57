"""The real GSM8K through the real stack: an evaluation of 200 test questions, then three steps on
train questions. Where the reasoning-gym package is installed, half of each batch is of three of its
tasks.

The starter model has never seen such questions and solves next to none; with the format reward it
still has something to learn, and every part works as it would with a model that can.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from example_trainer.launcher import roles
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm, trainer_command

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(480)]

GSM8K = ROOT.parent / "shared" / "gsm8k"
STARTER = ROOT / "assets" / "starter_model"
STEPS = 3
PUZZLES = (
    "{chain_sum: {level: 0}, gcd: {}, letter_counting: {}}"
    if importlib.util.find_spec("reasoning_gym")
    else ""
)
"""Tasks whose answers are numbers of few digits: the model's hold them often enough that answers to
one question differ."""


def test_evaluate_and_three_training_steps(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    if not GSM8K.is_dir():
        pytest.skip("no local copy of GSM8K in ../shared/gsm8k")
    puzzles = None
    server = start_vllm(processes, free_port, STARTER, tmp_path)
    port = free_port()
    url = f"http://localhost:{port}"
    settings: dict[str, roles.Value] = {"dataset_path": GSM8K, "max_token_length": 64}

    def environment(action: str = "serve", **more: roles.Value) -> list[str]:
        words = roles.environment(
            "gsm8k", url, [server.url], action=action, settings=settings | more
        )
        return [*words, "--env.format_reward"]

    result = tmp_path / "evaluation.json"
    command = environment("evaluate", eval_size=40, eval_output=result)
    processes.finish(processes.start("evaluate", command), 240)
    evaluation = json.loads(result.read_text())
    assert evaluation["num_problems"] == 40
    assert 0 <= evaluation["correct"] <= 40
    assert evaluation["weight_version"] == 0

    service = processes.start_service(port)
    half = 0.5 if PUZZLES else None
    processes.start("gsm8k", environment(min_batch_allocation=half), may_finish=True)
    if PUZZLES:
        words = roles.environment(
            "reasoning_gym",
            url,
            [server.url],
            settings={
                "tasks": PUZZLES,
                "answer_form": "boxed",
                "system_prompt": "",
                "max_token_length": 48,
                "eval_size": 6,
                "steps_per_eval": 2,
                "eval_output": tmp_path / "puzzles.json",
                "min_batch_allocation": half,
            },
        )
        puzzles = processes.start("puzzles", words, may_finish=True)
    command = trainer_command(
        STARTER,
        url,
        tmp_path,
        vllm_port=server.port,
        lr=1e-4,
        training_steps=STEPS,
        batch_size=16,
        gradient_accumulation_steps=2,
    )
    trainer = processes.start("trainer", command)
    processes.finish(trainer, 240)
    rows = [
        json.loads(line)
        for line in (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["params_mapped"] == row["params_total"] > 0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    if puzzles is not None:
        log = processes.finish(puzzles, 180)
        assert all(
            f"train/score/{task}=" in log for task in ("chain_sum", "gcd", "letter_counting")
        )
        assert "Traceback" not in log
    state = server.state()
    assert (state["weight_version"], state["state"]) == (STEPS, "serving")
    assert state["checksums"] == [rows[-1]["checksum"]]
    assert (tmp_path / "checkpoints" / f"step_{STEPS}" / "model.safetensors").is_file()
    assert service.poll() is None
