"""Right answers of an environment, collected as data by real processes."""

import json
import sys
from pathlib import Path

import pytest

from tests.atroposlib.envs.env_stack import Stack
from tests.forked_commands import run_command

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.e2e
def test_right_answers_become_data_and_then_the_environment_ends(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    # The environment gets four different answers to each question, and one of them is right.
    stack.use_inference(shared_inference, cycle=[f"\\boxed{{{answer}}}" for answer in range(1, 5)])
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"question": f"one plus {n}?", "answer": n + 1}) + "\n" for n in range(4)
        )
    )
    stack.start_service()
    math = ROOT / "environments" / "math_server.py"
    environment = stack.start_environment(
        math, "--env.dataset_path", str(questions), "--env.group_size", "4"
    )
    file = tmp_path / "data.jsonl"
    collecting = run_command(
        [
            *(
                sys.executable,
                "-m",
                "atroposlib.cli.sft",
                file,
                "--api-url",
                stack.service_url,
                "--group-size",
                "4",
            ),
            *(
                "--tasks-per-step",
                "2",
                "--num-seqs-to-save",
                "5",
                "--tokenizer",
                stack.tokenizer_dir,
            ),
        ]
    )
    assert collecting.returncode == 0, collecting.stdout
    stack.processes.finish(environment, 180)
    stack.control(cycle=None)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["score"] for row in rows] == [1.0] * 5
    for row in rows:
        number = int(row["prefix"].partition("one plus ")[2][0])
        assert row["completion"].startswith(f"\\boxed{{{number + 1}}}")
