"""`evaluate` and `process` as a person runs them."""

import json
from pathlib import Path

import pytest
import yaml
from env_stack import Stack

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]
ARITHMETIC = ROOT / "environments" / "arithmetic_server.py"


def test_evaluate_writes_the_result_and_readable_samples(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference, version=5)
    output = tmp_path / "deep" / "result.json"
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump({"env": {"eval_size": 3, "eval_output": str(output)}}))
    command = stack.start_environment(ARITHMETIC, "evaluate", "--config", str(config), "--env.eval_size", "40")
    log = stack.processes.finish(command, 60)
    assert "40 of 40 correct (100.0 %)" in log
    result = json.loads(output.read_text())
    samples = [json.loads(line) for line in (tmp_path / "deep" / "result.samples.jsonl").read_text().splitlines()]
    assert result["environment"] == "arithmetic"
    assert result["model"] == str(stack.tokenizer_dir)
    assert (result["num_problems"], result["correct"]) == (40, 40)
    assert (result["percent_correct"], result["fraction_correct"], result["weight_version"]) == (100.0, 1.0, 5)
    assert len(samples) == 40
    assert result["mean_response_tokens"] == sum(sample["response_tokens"] for sample in samples) / 40
    assert samples[0]["messages"][-1] == {"role": "assistant", "content": f"\\boxed{{{samples[0]['gold_answer']}}}"}


def test_evaluate_counts_what_is_wrong(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference, text="I do not know")
    output = tmp_path / "result.json"
    command = stack.start_environment(ARITHMETIC, "evaluate", "--env.eval_size", "10", "--env.eval_output", str(output))
    stack.processes.finish(command, 60)
    assert json.loads(output.read_text())["fraction_correct"] == 0.0


def test_process_writes_groups_and_a_page(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference, version=2)
    groups = tmp_path / "groups.jsonl"
    command = stack.start_environment(
        ARITHMETIC, "process", "--env.total_steps", "3", "--env.group_size", "4", "--env.data_path_to_save_groups", str(groups)
    )
    stack.processes.finish(command, 60)
    rows = [json.loads(line) for line in groups.read_text().splitlines()]
    assert [len(row["tokens"]) for row in rows] == [4, 4, 4]
    assert rows[0]["messages"][0][-1]["role"] == "assistant"
    page = groups.with_suffix(".html").read_text()
    assert page.count("<article>") == 12
    assert "logprob -0.2500" in page
    assert "<script" not in page
    assert "http" not in page, "the page must be self-contained"


def test_process_never_overwrites_earlier_groups(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference)
    groups = tmp_path / "groups.jsonl"
    groups.write_text("earlier\n")
    command = stack.start_environment(
        ARITHMETIC, "process", "--env.total_steps", "1", "--env.data_path_to_save_groups", str(groups)
    )
    stack.processes.finish(command, 60)
    assert groups.read_text() == "earlier\n"
    assert len((tmp_path / "groups_1.jsonl").read_text().splitlines()) == 1
