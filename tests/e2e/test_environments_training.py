"""The code, the judge and the calculator environment and one of several turns through the real
stack, in one run. The model has never seen code, and solves nothing; with credit for form, and a
judge that likes every second answer, it still has something to learn. Now and then it asks the
calculator, and is right: nothing else can make the answers to one of its problems differ. Each turn
of the conversations has a reward of its own, so their groups bring their own advantages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.envs.multi_turn import sampled_runs
from atroposlib.wire import PROMPT_MASK
from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher import roles
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm, trainer_command
from tests.environments.standin_judge import judging

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(480)]

MODEL = ROOT / "assets" / "calculator_model"
STEPS = 2
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
            training_steps=STEPS,
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
        noted = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert (
            sum(row.get("train/items_sent_to_api", 0) for row in noted) * GROUPS[name]
            >= BATCH // 4 * STEPS
        )
        log = process.log_path.read_text()
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
    posted = [json.loads(line) for line in groups.read_text().splitlines()]
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
    assert service.poll() is None


def of_turns(mask: list[int], advantages: list[float]) -> list[list[float]]:
    """The advantages of the tokens of each turn; what was not sampled has none."""
    assert all(
        advantage == 0
        for token, advantage in zip(mask, advantages, strict=True)
        if token == PROMPT_MASK
    )
    return [advantages[begin:end] for begin, end in sampled_runs(mask)]
