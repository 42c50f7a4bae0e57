"""An environment file written for the public interface serves, processes and evaluates unchanged."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.processes import wait_until
from tests.atroposlib.envs.env_stack import Stack

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("public_style_env.py")


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file finds atroposlib installed; here it is found in the repository."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def start(stack: Stack, *flags: str) -> Any:
    return stack.start_environment(SCRIPT, *flags, "--env.tokenizer_name", str(stack.tokenizer_dir))


def finished(process: Any) -> str:
    wait_until("the end", lambda: None if process.poll() is not None else "it still runs", 120)
    log: str = process.log_path.read_text(errors="replace")
    assert process.poll() == 0, log
    return log


def test_serve_with_one_response_at_a_time(
    stack: Stack, shared_inference: str, tokenizer: Any, tmp_path: Path
) -> None:
    stack.use_inference(shared_inference)
    stack.start_service()
    stack.register_trainer(num_steps=4, batch_size=8, save_checkpoint_interval=2)
    environment = start(stack)
    for batch in stack.take_batches(4):
        for group in batch:
            assert len(group["tokens"]) == 4
            assert set(group["scores"]) == {1.0, -1.0}
            for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
                trained = tokenizer.decode([token for token in mask if token != -100])
                assert trained.startswith("\\boxed{")
                assert tokenizer.decode(tokens).endswith(trained)
    stack.end_run()
    log = finished(environment)
    assert "train/percent_correct=" in log
    assert "evaluating at step" in log
    told = httpx.get(f"{stack.service_url}/evaluations", timeout=60).json()["evaluations"][0]
    assert (told["env_id"], told["name"], told["metrics"]) == (
        0,
        "sums",
        {"eval/percent_correct": 1.0},
    )
    assert told["weight_version"] is None, "a chat completion does not tell"
    kept = list(tmp_path.glob("env_checkpoints/sums_0/step-*.json"))
    assert kept
    assert json.loads(kept[0].read_text())["seen"] > 0


def test_serve_with_conversations_of_two_turns(
    stack: Stack, shared_inference: str, tokenizer: Any
) -> None:
    stack.use_inference(shared_inference, version=9)
    stack.start_service()
    stack.register_trainer(num_steps=2, batch_size=8)
    environment = start(stack, "--env.two_turns", "true")
    for batch in stack.take_batches(2):
        for group in batch:
            assert group["weight_versions"] == [9] * 4, (
                "the file knows nothing of versions, yet they are passed on"
            )
            assert {told["temperature"] for told in group["sampling_params"]} == {1.0}, (
                "nor of what was sampled how"
            )
            assert group["finish_reasons"] == ["stop"] * 4
            for mask, logprobs in zip(group["masks"], group["inference_logprobs"], strict=True):
                trained = tokenizer.decode([token for token in mask if token != -100])
                assert trained.count("\\boxed{") == 2, "both turns are trained, in one sequence"
                assert [p == 1.0 for p in logprobs] == [m == -100 for m in mask]
    stack.end_run()
    finished(environment)


def test_process_and_evaluate(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference)
    groups = tmp_path / "groups.jsonl"
    made = start(
        stack, "process", "--env.total_steps", "2", "--env.data_path_to_save_groups", str(groups)
    )
    finished(made)
    assert [len(json.loads(line)["tokens"]) for line in groups.read_text().splitlines()] == [4, 4]
    assert f"read them with: view-run {groups}" in made.log_path.read_text()
    finished(start(stack, "evaluate", "--env.data_dir_to_save_evals", str(tmp_path / "evals")))
    metrics = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert metrics["results"]["all"] == {"eval/percent_correct": 1.0}
    assert metrics["config_general"]["generation_parameters"]["temperature"] == 0.0
    assert len((tmp_path / "evals" / "samples.jsonl").read_text().splitlines()) == 10


def test_an_openai_endpoint_that_ignores_n_is_asked_n_times(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    stack.use_inference(shared_inference, ignore_n=True)
    output = tmp_path / "groups.jsonl"
    flags = (
        "--openai.server_type",
        "openai",
        "--env.total_steps",
        "1",
        "--env.data_path_to_save_groups",
        str(output),
    )
    finished(start(stack, "process", *flags))
    stack.control(ignore_n=False)
    assert len(output.read_text().splitlines()) == 1
