"""The real GSM8K through the real stack: an evaluation of 200 test questions, then three steps on
train questions. Where the reasoning-gym package is installed, half of each batch is of three of its
tasks.

The starter model has never seen such questions and solves next to none; with the format reward it
still has something to learn, and every part works as it would with a model that can.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

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
    environment = [sys.executable, ROOT / "environments/gsm8k_server.py"]
    flags = [
        "--env.dataset_path",
        GSM8K,
        "--env.max_token_length",
        "64",
        "--openai.base_url",
        server.url,
        "--env.format_reward",
    ]
    flags += ["--env.rollout_server_url", f"http://localhost:{port}"]

    result = tmp_path / "evaluation.json"
    evaluate = processes.start(
        "evaluate",
        [*environment, "evaluate", *flags, "--env.eval_size", "40", "--env.eval_output", result],
    )
    processes.finish(evaluate, 240)
    evaluation = json.loads(result.read_text())
    assert evaluation["num_problems"] == 40
    assert 0 <= evaluation["correct"] <= 40
    assert evaluation["weight_version"] == 0

    service = processes.start_service(port)
    half = ["--env.min_batch_allocation", "0.5"] if PUZZLES else []
    processes.start("gsm8k", [*environment, "serve", *flags, *half], may_finish=True)
    if PUZZLES:
        words = [
            sys.executable,
            ROOT / "environments/reasoning_gym_server.py",
            "serve",
            "--env.tasks",
            PUZZLES,
        ]
        words += [
            "--env.answer_form",
            "boxed",
            "--env.system_prompt",
            "",
            "--env.max_token_length",
            "48",
            "--env.eval_size",
            "6",
        ]
        words += [
            "--env.steps_per_eval",
            "2",
            "--env.eval_output",
            tmp_path / "puzzles.json",
            "--openai.base_url",
            server.url,
        ]
        puzzles = processes.start(
            "puzzles",
            [*words, "--env.rollout_server_url", f"http://localhost:{port}", *half],
            may_finish=True,
        )
    trainer = processes.start(
        "trainer",
        [
            *(sys.executable, "-u", ROOT / "example_trainer/grpo.py", "--model-name", STARTER),
            *(
                "--weight-bridge-mode",
                "shared_vllm",
                "--single-copy",
                "--vllm-port",
                str(server.port),
            ),
            *(
                "--atropos-url",
                f"http://localhost:{port}",
                "--lr",
                "1e-4",
                "--training-steps",
                str(STEPS),
            ),
            *("--batch-size", "16", "--gradient-accumulation-steps", "2"),
            *("--save-path", tmp_path / "checkpoints", "--log-dir", tmp_path / "trainer"),
        ],
    )
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
