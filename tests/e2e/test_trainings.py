"""Whole trainings with all processes real: a teacher, several environments at once, the real GSM8K, and
environments of the verifiers package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atroposlib.envs.multi_turn import sampled_runs
from atroposlib.wire import PROMPT_MASK
from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher import roles
from example_trainer.models.hf_checkpoint import load_model
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import trainer_logprobs
from tests.e2e.conftest import SERVER_SECONDS, start_vllm, trainer_command, vllm_command
from tests.environments.standin_judge import judging
from tests.still_running import json_rows

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(480)]
STARTER = ROOT / "assets" / "starter_model"
STEPS, STEPS_BEFORE = 8, 2
NOT_TRAINED = -100


def make_teacher(folder: Path) -> Path:
    """The starter model with other weights, and so another opinion of what it samples."""
    shutil.copytree(STARTER, folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noise = {
        n: torch.randn(w.shape, generator=generator) * 0.3 * w.float().std()
        for n, w in weights.items()
        if w.dim() == 2
    }
    moved = {
        name: (weight + noise[name].to(weight.dtype) if name in noise else weight)
        for name, weight in weights.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_student_trains_on_what_its_teacher_says_which_dies_on_the_way(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    teacher_model = make_teacher(tmp_path / "teacher")
    ports = {"student": free_port(), "teacher": free_port(), "service": free_port()}
    urls = {name: f"http://localhost:{port}" for name, port in ports.items()}

    def start_teacher() -> Any:
        command = vllm_command(teacher_model, ports["teacher"], "--max-model-len", "256")
        return processes.start(
            "teacher", command, {"VLLM_ENABLE_SHARED_WEIGHTS": None, "OMP_NUM_THREADS": "1"}
        )

    teacher = start_teacher()
    command = vllm_command(STARTER, ports["student"], "--max-model-len", "256")
    environment = {
        "VLLM_ENABLE_SHARED_WEIGHTS": "1",
        "LOGDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    processes.start("student", command, environment)
    processes.start_service(ports["service"])
    words = taught_environment(urls, tmp_path)
    sender = processes.start("environment", words, may_finish=True)
    processes.wait_for_http(f"{urls['student']}/health_generate", SERVER_SECONDS)
    command = trainer_command(
        STARTER,
        urls["service"],
        tmp_path,
        vllm_port=ports["student"],
        advantages="zero",
        distill_coef=1,
        lr=1e-4,
        training_steps=STEPS,
        batch_size=16,
        gradient_accumulation_steps=1,
        seq_len=256,
        num_threads=1,
    )
    trainer = processes.start("trainer", command)

    def rows() -> list[dict[str, Any]]:
        return json_rows(tmp_path / "trainer" / "metrics.jsonl")

    processes.wait_until(
        "two steps", lambda: None if len(rows()) >= STEPS_BEFORE else f"{len(rows())} steps", 240
    )
    processes.kill(teacher)
    processes.wait_for_text(sender, f"Waiting for teacher at {urls['teacher']}", 180)
    start_teacher()
    processes.finish(trainer, 240)
    text = processes.finish(sender, 180)

    assert "(none dropped)" in text, "a group that waited is a group that was sent"
    assert f"teacher at {urls['teacher']}: there after" in text
    found = rows()
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert all(row["grad_norm"] > 0 and row["teacher_kl"] > 0 for row in found)

    expect_taught(teacher_model, json_rows(tmp_path / "groups.jsonl"))


def taught_environment(urls: dict[str, str], folder: Path) -> list[str]:
    """The command of an environment with a teacher."""
    return roles.environment(
        "arithmetic",
        urls["service"],
        [urls["student"]],
        settings={
            "teacher_url": urls["teacher"],
            "group_size": 4,
            "max_token_length": 24,
            "seed_rollouts": True,
            "data_path_to_save_groups": folder / "groups.jsonl",
            "eval_size": 2,
        },
    )


def expect_taught(teacher_model: Path, groups: list[dict[str, Any]]) -> None:
    """Every sampled token has the teacher's logprob, and the first and last sequences the right one."""
    its_model = load_model(str(teacher_model), torch.float32)
    sequences = []
    for group in groups:
        for tokens, mask, ids, logprobs in zip(
            *(group[name] for name in ("tokens", "masks", "distill_token_ids", "distill_logprobs")),
            strict=True,
        ):
            sampled = [at for at, token in enumerate(mask) if token != NOT_TRAINED]
            assert [at for at, entry in enumerate(ids) if entry] == sampled
            assert [ids[at] for at in sampled] == [[tokens[at]] for at in sampled]
            sequences.append(
                (tokens, sampled[0], torch.tensor([logprobs[at][0] for at in sampled]))
            )
    for tokens, prompt, said in sequences[:4] + sequences[-4:]:  # before the teacher died and after
        torch.testing.assert_close(
            said, trainer_logprobs(its_model, tokens[:prompt], tokens[prompt:]), rtol=0, atol=1e-4
        )


MODEL = ROOT / "assets" / "calculator_model"
STEPS_ENVIRONMENTS_TRAINING = 2


BATCH = 32
GROUPS = {"code": 4, "judge": 4, "turns": 4, "calculator": 8}


"""Answers to one problem. One in twelve or so asks the calculator, so that it takes more of them
until some differ. Each environment has a quarter of a batch."""


def test_all_are_trained_on(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    server = start_vllm(processes, free_port, MODEL, tmp_path)
    port = free_port()
    service = processes.start_service(port)

    url = f"http://localhost:{port}"

    def environment(name: str, **settings: roles.Value) -> ManagedProcess:
        common: dict[str, roles.Value] = {
            "max_token_length": 24,
            "group_size": GROUPS[name],
            "min_batch_allocation": 0.25,
            "steps_per_eval": 1,
            "metrics_path": tmp_path / f"{name}.jsonl",
        }
        file = "tests/e2e/sums_in_turns.py" if name == "turns" else name
        words = roles.environment(file, url, [f"{server.url}/v1"], settings=common | settings)
        return processes.start(name, words, may_finish=True)

    with judging() as judge:
        judge.says = ["Score: 2", "Score: 8"] * 1000
        groups = tmp_path / "groups.jsonl"
        running = {
            "code": environment("code", eval_size=4, format_reward=1.0),
            "judge": environment("judge", eval_size=4, judge_url=judge.url),
            "turns": environment("turns", turn_rewards="to_go", data_path_to_save_groups=groups),
            "calculator": environment("calculator", eval_size=4),
        }
        command = trainer_command(
            MODEL,
            url,
            tmp_path,
            vllm_port=server.port,
            lr=1e-4,
            training_steps=STEPS_ENVIRONMENTS_TRAINING,
            batch_size=BATCH // 2,
            gradient_accumulation_steps=2,
        )
        trainer = processes.start("trainer", command)
        processes.finish(trainer, 240)
        for process in running.values():
            processes.finish(process, 120)
        assert judge.asked
    rows = [
        json.loads(line)
        for line in (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in rows)
    for name, process in running.items():
        expect_sent(name, json_rows(tmp_path / f"{name}.jsonl"), process.log_path.read_text())
    posted = [json.loads(line) for line in groups.read_text().splitlines()]
    expect_rewards_of_turns(posted)
    assert service.poll() is None


def expect_rewards_of_turns(posted: list[dict[str, Any]]) -> None:
    turns = [
        of_turns(*row)
        for group in posted
        for row in zip(group["masks"], group["advantages"], strict=True)
    ]
    assert all(len(set(turn)) == 1 for row in turns for turn in row), (
        "all tokens of a turn answer for the same"
    )
    assert any(len(row) == 2 and row[0][0] != row[1][0] for row in turns), (
        "and two turns of one conversation need not"
    )


def expect_sent(name: str, noted: list[dict[str, Any]], log: str) -> None:
    """Expect the notes and the log of an environment whose groups were trained on."""
    assert (
        sum(row.get("train/items_sent_to_api", 0) for row in noted) * GROUPS[name]
        >= BATCH // 4 * STEPS_ENVIRONMENTS_TRAINING
    )
    assert f"evaluation of {'sums_in_turns' if name == 'turns' else name}: " in log
    # The model may write a tool's argument that is not valid: that is logged once, with its
    # place.
    assert log.count("Traceback") == log.count("a tool call went wrong (raised")
    if name == "code":
        assert max(row.get("train/code_crash", 0) for row in noted) > 0.5, (
            "what this model writes is no Python"
        )
    if name == "calculator":
        assert 0 < max(row.get("train/tool_use", 0) for row in noted) < 1


def of_turns(mask: list[int], advantages: list[float]) -> list[list[float]]:
    """The advantages of the tokens of each turn; what was not sampled has none."""
    assert all(
        advantage == 0
        for token, advantage in zip(mask, advantages, strict=True)
        if token == PROMPT_MASK
    )
    return [advantages[begin:end] for begin, end in sampled_runs(mask)]


GSM8K = ROOT.parent / "shared" / "gsm8k"
STEPS_GSM8K_TRAINING = 3


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
        words = puzzle_environment(url, server.url, tmp_path / "puzzles.json")
        puzzles = processes.start("puzzles", words, may_finish=True)
    command = trainer_command(
        STARTER,
        url,
        tmp_path,
        vllm_port=server.port,
        lr=1e-4,
        training_steps=STEPS_GSM8K_TRAINING,
        batch_size=16,
        gradient_accumulation_steps=2,
    )
    trainer = processes.start("trainer", command)
    processes.finish(trainer, 240)
    rows = json_rows(tmp_path / "trainer" / "metrics.jsonl")
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
    assert (state["weight_version"], state["state"]) == (STEPS_GSM8K_TRAINING, "serving")
    assert state["checksums"] == [rows[-1]["checksum"]]
    assert (
        tmp_path / "checkpoints" / f"step_{STEPS_GSM8K_TRAINING}" / "model.safetensors"
    ).is_file()
    assert service.poll() is None


def puzzle_environment(service: str, server: str, result: Path) -> list[str]:
    """The command of an environment of puzzles, with half of each batch."""
    return roles.environment(
        "reasoning_gym",
        service,
        [server],
        settings={
            "tasks": PUZZLES,
            "answer_form": "boxed",
            "system_prompt": "",
            "max_token_length": 48,
            "eval_size": 6,
            "steps_per_eval": 2,
            "eval_output": result,
            "min_batch_allocation": 0.5,
        },
    )


PYTHON = os.environ.get("LOCKSTEP_VERIFIERS_PYTHON", "")
STEPS_VERIFIERS_TRAINING = 3


GROUP = 8


def test_three_training_steps(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    skip_without_verifiers()
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
            "steps_per_eval": STEPS_VERIFIERS_TRAINING,
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
        training_steps=STEPS_VERIFIERS_TRAINING,
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
    assert [row["step"] for row in rows] == list(range(1, STEPS_VERIFIERS_TRAINING + 1))
    assert all(row["grad_norm"] > 0 for row in rows)
    assert server.state()["weight_version"] == STEPS_VERIFIERS_TRAINING
    noted = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (
        sum(row.get("train/items_sent_to_api", 0) for row in noted) >= 2 * STEPS_VERIFIERS_TRAINING
    )
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


def skip_without_verifiers() -> None:
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
