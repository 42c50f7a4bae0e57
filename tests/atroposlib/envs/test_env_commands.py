"""`evaluate` and `process` as a person runs them."""

import json
from pathlib import Path

import pytest
import yaml

from example_trainer.child_processes.processes import ProcessDied, wait_until
from tests.atroposlib.envs.env_stack import Stack

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]
ARITHMETIC = ROOT / "environments" / "arithmetic_server.py"


def test_evaluate_writes_the_result_and_readable_samples(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    stack.use_inference(shared_inference, version=5)
    output = tmp_path / "deep" / "result.json"
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump({"env": {"eval_size": 3, "eval_output": str(output)}}))
    kept = tmp_path / "kept"
    flags = (
        "--env.eval_size",
        "40",
        "--env.data_dir_to_save_evals",
        str(kept),
        "--openai.api_key",
        "secret",
    )
    command = stack.start_environment(ARITHMETIC, "evaluate", "--config", str(config), *flags)
    log = stack.processes.finish(command, 120)
    assert "40 of 40 correct (100.0 %)" in log
    result = json.loads(output.read_text())
    samples = [
        json.loads(line)
        for line in (tmp_path / "deep" / "result.samples.jsonl").read_text().splitlines()
    ]
    asked = (kept / "evaluate_config.yaml").read_text()
    assert yaml.safe_load(asked)["env"]["eval_size"] == 40
    assert "secret" not in asked
    assert result["environment"] == "arithmetic"
    assert result["model"] == str(stack.tokenizer_dir)
    assert (result["num_problems"], result["correct"]) == (40, 40)
    assert (result["percent_correct"], result["fraction_correct"], result["weight_version"]) == (
        100.0,
        1.0,
        5,
    )
    assert len(samples) == 40
    assert (
        result["mean_response_tokens"] == sum(sample["response_tokens"] for sample in samples) / 40
    )
    assert samples[0]["messages"][-1] == {
        "role": "assistant",
        "content": f"\\boxed{{{samples[0]['gold_answer']}}}",
    }


@pytest.mark.parametrize(
    ("command", "flag"),
    [("evaluate", "--env.eval_output"), ("process", "--env.data_path_to_save_groups")],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    stack: Stack, shared_inference: str, tmp_path: Path, command: str, flag: str
) -> None:
    stack.use_inference(shared_inference)
    (tmp_path / "file").touch()
    lines = {
        tmp_path: f"error: {flag} {tmp_path} is a folder: name a file in it",
        tmp_path
        / "file"
        / "result.json": f"error: {flag}: cannot write {tmp_path}/file/result.json",
    }
    for path, line in lines.items():
        started = stack.start_environment(ARITHMETIC, command, flag, str(path))
        with pytest.raises(ProcessDied, match="exited with code 2"):
            started.wait(120)
        assert started.log_path.read_text().startswith(line)  # no line about work is above it


@pytest.mark.parametrize("groups", ["0", "-1"])
def test_process_refuses_to_make_no_groups(
    stack: Stack, shared_inference: str, groups: str
) -> None:
    stack.use_inference(shared_inference)
    started = stack.start_environment(ARITHMETIC, "process", "--env.total_steps", groups)
    with pytest.raises(ProcessDied, match="exited with code 2"):
        started.wait(120)
    assert started.log_path.read_text().startswith(
        f"error: --env.total_steps {groups}: `process` makes this many groups, give 1 or more"
    )


def test_process_writes_groups_and_says_how_to_read_them(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    stack.use_inference(shared_inference, version=2)
    groups = tmp_path / "groups.jsonl"
    command = stack.start_environment(
        ARITHMETIC,
        "process",
        "--env.total_steps",
        "3",
        "--env.group_size",
        "4",
        "--env.data_path_to_save_groups",
        str(groups),
    )
    stack.processes.finish(command, 120)
    rows = [json.loads(line) for line in groups.read_text().splitlines()]
    assert [len(row["tokens"]) for row in rows] == [4, 4, 4]
    assert rows[0]["messages"][0][-1]["role"] == "assistant"
    assert (
        f"wrote the groups to {groups}; read them with: view-run {groups} --tokenizer "
        in command.log_path.read_text()
    )


def test_a_server_that_refuses_ends_an_evaluation_with_one_clear_line(
    stack: Stack, shared_inference: str
) -> None:
    stack.use_inference(shared_inference, fail_next=10_000)
    command = stack.start_environment(ARITHMETIC, "evaluate", "--env.eval_size", "2")
    wait_until("its end", lambda: None if command.poll() is not None else "it still runs", 120)
    stack.control(fail_next=0)
    log = command.log_path.read_text()
    assert command.poll() == 1
    assert log.strip().splitlines()[-1].startswith("error: 500: ")
    assert "Traceback" not in log
