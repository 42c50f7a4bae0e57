"""The documentation's example: it is what the page shows, it fits on the page, and it works."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.atroposlib.envs.env_stack import Stack
from tests.forked_commands import run_command

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
def test_its_right_answers_become_data_and_then_it_ends(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference, cycle=["\\boxed{1}", "\\boxed{2}", "\\boxed{3}", "\\boxed{4}"])
    stack.start_service()
    environment = stack.start_environment(EXAMPLE, "--env.group_size", "4")
    file = tmp_path / "data.jsonl"
    collecting = run_command(
        [
            *(sys.executable, "-m", "atroposlib.cli.sft", file, "--api-url", stack.service_url, "--group-size", "4"),
            *("--tasks-per-step", "2", "--num-seqs-to-save", "5", "--tokenizer", stack.tokenizer_dir),
        ]
    )
    assert collecting.returncode == 0, collecting.stdout
    stack.processes.finish(environment, 180)
    stack.control(cycle=None)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["score"] for row in rows] == [1.0] * 5
    for row in rows:
        asked = re.search(r"How often is (.) in (\w+)\? .*<\|im_start\|>assistant\n$", row["prefix"], re.DOTALL)
        assert asked is not None
        assert row["completion"].startswith(f"\\boxed{{{asked[2].count(asked[1])}}}")


@pytest.mark.e2e
def test_it_evaluates(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference, text="\\boxed{2}")
    output = tmp_path / "result.json"
    stack.processes.finish(stack.start_environment(EXAMPLE, "evaluate", "--env.eval_output", str(output)), 180)
    twice = sum(word.count(letter) == 2 for word in ("parallel", "address", "coffee", "success") for letter in set(word))
    result = json.loads(output.read_text())
    assert (result["num_problems"], result["correct"]) == (18, twice)
