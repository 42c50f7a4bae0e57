"""The code environment: what an answer's program is worth, and that the sandbox's own failures are
worth nothing at all.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.single_turn import Grade, Response
from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.sandbox import Limits, Outcome, Program, SandboxBroken, SandboxUnavailable
from atroposlib.utils.jsonl import train_and_test
from environments.code_server import (
    Call,
    CodeEnv,
    CodeProblem,
    make_sandbox,
    program_in,
    read_problem,
)
from tests.atroposlib.envs.env_stack import Stack

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "environments" / "code_server.py"
ROW = {
    "question": "Add one.",
    "function": "inc",
    "tests": [{"args": [n], "expected": n + 1} for n in (1, 5, 9)],
}
PROBLEM = CodeProblem("Add one.", "inc", tuple(Call((n,), n + 1) for n in (1, 5, 9)))
RIGHT = "Sure:\n```python\ndef inc(n):\n    return n + 1\n```\nDone."


class NoSandbox:
    """One of the reader's own, that cannot run anything."""

    def __init__(self, limits: Limits, allow_missing: tuple[str, ...]) -> None:
        self.limits, self.failure = limits, SandboxBroken("no room")

    async def start(self) -> None:
        if "network" not in CodeEnvSettings.allowed:
            raise SandboxUnavailable("no network isolation", {"network": "none"})

    async def run(self, program: Program) -> Outcome:
        raise self.failure

    async def close(self) -> None:
        pass


class CodeEnvSettings:
    """The verdict of the sandbox above."""

    allowed: tuple[str, ...] = ("network",)


@pytest.fixture
def env(tokenizer_dir: Path) -> CodeEnv:
    config, servers = CodeEnv.config_init()
    config.tokenizer_name, config.sandbox_seconds = str(tokenizer_dir), 60.0
    return CodeEnv(config, servers)


def graded(env: CodeEnv, *texts: str, finished: bool = True) -> list[Grade]:
    async def run() -> list[Grade]:
        await env.setup()
        assert env.box is not None
        responses = [Response(text, 5, finished) for text in texts]
        grades = list(
            await asyncio.gather(*(env.grade(PROBLEM, response) for response in responses))
        )
        assert env.adjust_scores(grades, responses) == [grade.score for grade in grades]
        await env.box.close()
        return grades

    return asyncio.run(run())


def test_what_an_answer_is_worth(env: CodeEnv, caplog: pytest.LogCaptureFixture) -> None:
    env.config.partial_credit, env.config.format_reward = 0.6, 0.2
    right, third, raises, text, cheats = graded(
        env,
        RIGHT,
        "```python\ndef inc(n):\n    return 2\n```",
        "```\ndef inc(n): raise KeyError(n)\n```",
        "It is n plus one.",
        "```python\nimport sys\ndef inc(n): print('PASSED'); sys.exit(0)\n```",
    )
    assert (right.score, right.correct) == (1.0, True)
    assert third == Grade(pytest.approx(-1 + 0.2 + 0.2), False, "wrong: call 1 returned 2")
    assert raises == Grade(pytest.approx(-1 + 0.2), False, "crash: call 0 raised KeyError: 1")
    env.config.sandbox_seconds, env.box = 1.0, None  # short: no program here has to end in time
    hanging = graded(env, "while True: pass", "import time\ntime.sleep(60)")
    assert [str(grade.answer).partition(":")[0] for grade in hanging] == [
        "timeout",
        "timeout",
    ]
    assert (text.score, str(text.answer)[:18]) == (pytest.approx(-1 + 0.1), "crash: SyntaxError")
    assert (cheats.correct, str(cheats.answer)) == (False, "crash: call 0 raised SystemExit: 0")
    assert caplog.text.count("raise --env.sandbox_seconds (logged once)") == 1
    assert {name: sum(values) for name, values in env._noted.items()} == {
        **{"code_timeout": 2, "code_contained": 0, "code_crash": 3, "code_wrong": 1}
    }


def test_the_last_block_is_the_program() -> None:
    assert program_in("```python\nx\n```\nno:\n```py\ny\n```") == "y"
    response = Response("<think>```python\nx\n```</think>\ndef f(): pass", 5, True)
    assert program_in(response.answer) == "\ndef f(): pass"
    assert program_in(Response("```python\nx\n```", 5, True, "<think>\n").answer) == "", (
        "reasoning that never ends"
    )
    assert program_in("```python\ncut off") == "cut off"


def test_a_sandbox_of_ones_own_that_fails_gives_no_score(
    env: CodeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env.config.sandbox = f"{__name__}:NoSandbox"
    for _ in range(2):
        with pytest.raises(RolloutFailure, match="could not run a program: no room"):
            graded(env, RIGHT)
    assert env.drops.metrics()["train/dropped_sandbox_broken"] == 2
    assert (
        caplog.text.count("no room; is the machine short of memory or processes? (logged once)")
        == 1
    )
    assert isinstance(env.box, NoSandbox)
    env.box.failure = SandboxUnavailable("it is gone")  # type: ignore[assignment]
    with pytest.raises(EnvironmentFailure, match="it is gone"):
        graded(env, RIGHT)
    CodeEnvSettings.allowed, env.box = (), None
    with pytest.raises(
        EnvironmentFailure, match=r"no network isolation \(--env.sandbox_allow_missing network\)"
    ):
        graded(env, RIGHT)
    env.config.sandbox = "nowhere:Box"
    with pytest.raises(UsageError, match=r"--env\.sandbox nowhere:Box: neither"):
        make_sandbox(env.config)


def test_rows_without_an_answer_are_left_out_and_counted(
    env: CodeEnv, tmp_path: Path, caplog: Any
) -> None:
    bad = ROW | {"tests": [{"args": [1]}]}
    (tmp_path / "train.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in (bad, ROW, bad))
    )
    (tmp_path / "test.jsonl").write_text(json.dumps(bad))
    with pytest.raises(
        UsageError,
        match=r"test.jsonl has no problems; .*line 1: 'tests\.0\.expected': field required",
    ):
        train_and_test(tmp_path, read_problem, "problems", env.drops.add)
    assert env.drops.metrics()["train/dropped_bad_rows"] == 2
    assert "train.jsonl are left out, mend or remove them; the first: " in caplog.text
    _, twice = train_and_test(tmp_path / "train.jsonl", read_problem, "problems", env.drops.add)
    assert [problem.question for problem in twice] == ["Add one."]


@pytest.mark.e2e
def test_it_serves_a_trainer_and_evaluates(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps(ROW))
    wrong = [
        "def inc(n): return n",
        "def inc(n): return n +",
        "import os\nif not os.fork():\n    while True: pass",
    ]
    stack.use_inference(shared_inference, cycle=[RIGHT, *wrong])
    stack.start_service()
    stack.register_trainer(num_steps=1, batch_size=8)
    stack.next_batch()
    own = ("--env.dataset_path", str(tmp_path / "own.jsonl"), "--env.sandbox_seconds", "60")
    environment = stack.start_environment(CODE, *own, "--env.group_size", "4")
    (batch,) = stack.take_batches(1)
    assert all(sorted(group["scores"]) == [-1.0, -1.0, -1.0, 1.0] for group in batch)
    log = environment.log_path.read_text()
    assert "the sandbox runs programs " in log
    assert "Traceback" not in log
    stack.processes.stop(environment)
    stack.control(cycle=None, text=RIGHT)
    output = tmp_path / "result.json"
    stack.processes.finish(
        stack.start_environment(CODE, "evaluate", *own, "--env.eval_output", str(output)), 120
    )
    assert json.loads(output.read_text())["fraction_correct"] == 1.0
