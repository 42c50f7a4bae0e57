"""The documentation's example: it is what the page shows, it fits on the page, and it works."""

import json
from pathlib import Path

import pytest

from tests.atroposlib.envs.env_stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "environments" / "letter_count_server.py"


def test_the_page_shows_the_file_and_it_has_at_most_40_lines() -> None:
    code = EXAMPLE.read_text()
    assert f"```python\n{code}```" in (ROOT / "docs" / "environments.md").read_text()
    assert len(code.splitlines()) <= 40


@pytest.mark.e2e
def test_it_serves_a_trainer(stack: Stack, shared_inference: str) -> None:
    # Four different answers to each question, of which one is right.
    stack.use_inference(shared_inference, cycle=["\\boxed{1}", "\\boxed{2}", "\\boxed{3}", "\\boxed{4}"])
    stack.start_service()
    stack.register_trainer(num_steps=1, batch_size=8)
    stack.next_batch()
    environment = stack.start_environment(EXAMPLE, "--env.group_size", "4")
    (batch,) = stack.take_batches(1)
    stack.control(cycle=None)
    assert all(sorted(group["scores"]) == [-1.0, -1.0, -1.0, 1.0] for group in batch)
    log = environment.log_path.read_text()
    assert "Traceback" not in log


@pytest.mark.e2e
def test_it_evaluates(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference, text="\\boxed{2}")
    output = tmp_path / "result.json"
    stack.processes.finish(stack.start_environment(EXAMPLE, "evaluate", "--env.eval_output", str(output)), 60)
    twice = sum(word.count(letter) == 2 for word in ("parallel", "address", "coffee", "success") for letter in set(word))
    result = json.loads(output.read_text())
    assert (result["num_problems"], result["correct"]) == (18, twice)
