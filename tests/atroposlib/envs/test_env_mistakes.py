"""A mistake in an environment ends `evaluate` and `process` with one line that names it."""

from pathlib import Path

import pytest

from example_trainer.child_processes.processes import wait_until
from tests.atroposlib.envs.env_stack import Stack

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("def setup(self): pass", "setup of Mine returned None at once: write `async def setup`"),
        ("def get_next_item(self): return 1", "get_next_item of Mine returned 1 at once"),
        ("def grade(self, problem, response): return 0.5", "grade of Mine returned 0.5 at once"),
        (
            "async def messages(self, problem): return []",
            "messages of Mine is asynchronous: write `def messages` without `async`",
        ),
        (
            "async def get_next_item(self): return next(iter(()))",
            "get_next_item of Mine raised StopIteration",
        ),
        (
            'async def collect_trajectories(self, item): return {"tokens": [], "masks": []}',
            "collect_trajectories of Mine returned {'tokens': [], 'masks': []}: return a pair",
        ),
        (
            'async def collect_trajectories(self, item): return [{"tokens": []}, {"tokens": []}]',
            "collect_trajectories of Mine returned [{'tokens': []}, {'tokens': []}]: return a pair",
        ),
        ("def messages(self, problem): return []", "messages is an empty list: give at least one"),
        (
            "async def adjust_scores(self, grades, responses): return [1.0] * len(grades)",
            "adjust_scores of Mine is asynchronous: write `def adjust_scores` without `async`",
        ),
        (
            "def adjust_scores(self, grades, responses): grades.sort(key=id)",
            "adjust_scores of Mine returned None: return a list with one score for each answer",
        ),
        (
            "async def grade(self, problem, response): return Grade(1.0, 'no')",
            "correct of a Grade is 'no': give True or False",
        ),
        (
            "async def grade(self, problem, response): return Grade(1.0, self.setup())",
            "correct of a Grade is <coroutine object",
        ),
    ],
)
def test_a_mistake_in_a_method_is_one_line(
    stack: Stack, shared_inference: str, tmp_path: Path, method: str, line: str
) -> None:
    stack.use_inference(shared_inference)
    path = str(tmp_path / "groups.jsonl")
    flags = ("process", "--env.total_steps", "2", "--env.data_path_to_save_groups", path)
    ends_with_a_line(stack, tmp_path, method, line, *flags)


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (
            "async def eval_problems(self): return []",
            "eval_problems of Mine is asynchronous: write `def eval_problems` without `async`",
        ),
        (
            "def describe(self, problem): return 'a sum'",
            "describe of Mine returned 'a sum': return a dict of fields",
        ),
        (
            "def describe(self, problem): return {'question': object()}",
            "a sample of the evaluation cannot be written to ",
        ),
    ],
)
def test_a_mistake_in_an_evaluation_is_one_line(
    stack: Stack, shared_inference: str, tmp_path: Path, method: str, line: str
) -> None:
    stack.use_inference(shared_inference)
    output = str(tmp_path / "result.json")
    flags = ("evaluate", "--env.eval_size", "2", "--env.eval_output", output)
    ends_with_a_line(stack, tmp_path, method, line, *flags)


@pytest.mark.parametrize(
    ("command", "method", "line"),
    [
        (
            "evaluate",
            "def eval_problems(self): return []",
            "evaluate of Mine returned no metrics, so nothing was measured",
        ),
        (
            "process",
            "async def get_next_item(self): return None",
            "no group of 8 was made (none dropped): see the lines above",
        ),
    ],
)
def test_a_command_that_has_nothing_to_do_fails(
    stack: Stack, shared_inference: str, tmp_path: Path, command: str, method: str, line: str
) -> None:
    stack.use_inference(shared_inference)
    flags = (command, "--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl"))
    ends_with_a_line(stack, tmp_path, method, line, *flags, status=1)


def ends_with_a_line(
    stack: Stack, folder: Path, method: str, line: str, *arguments: str, status: int = 2
) -> None:
    """Run a command of an environment that has this method, and expect this error."""
    script = folder / "mine_server.py"
    script.write_text(
        "from atroposlib.envs.single_turn import Grade\n"
        "from environments.arithmetic_server import ArithmeticEnv\n\n\n"
        f"class Mine(ArithmeticEnv):\n    {method}\n\n\nMine.cli()\n"
    )
    command = stack.start_environment(script, *arguments)
    wait_until("the command's end", lambda: None if command.poll() is not None else "it runs", 120)
    log = command.log_path.read_text()
    assert command.poll() == status
    assert f"error: {line}" in log
    assert "Traceback" not in log
