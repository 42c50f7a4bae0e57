"""An environment process against the real rollout service, through outages, faults in its own code,
and signals.
"""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.processes import wait_until
from tests.atroposlib.envs.env_stack import Stack
from tests.inference_standin import logprob

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

ROOT = Path(__file__).resolve().parents[3]
ARITHMETIC = ROOT / "environments" / "arithmetic_server.py"
FAULTY = Path(__file__).with_name("faulty_env.py")


def log_of(process: Any) -> str:
    return process.log_path.read_text(errors="replace")


def finished(process: Any, seconds: float = 120) -> int:
    """Wait until a process has ended by itself; its exit status."""
    wait_until(
        "the environment's end",
        lambda: None if process.poll() is not None else f"still runs: {process.tail(2)}",
        seconds,
    )
    return process.poll()


def check_group(group: dict[str, Any], tokenizer: Any, group_size: int) -> None:
    assert {
        len(group[field])
        for field in ("tokens", "masks", "scores", "inference_logprobs", "weight_versions")
    } == {group_size}
    assert len(set(group["scores"])) > 1, "a group whose scores are all equal teaches nothing"
    assert set(group["scores"]) <= {1.0, -1.0}
    for tokens, mask, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        assert len(tokens) == len(mask) == len(logprobs)
        prompt = [i for i, token in enumerate(mask) if token == -100]
        assert prompt == list(range(len(prompt)))
        assert all(logprobs[i] == 1.0 for i in prompt)
        assert mask[len(prompt) :] == tokens[len(prompt) :]
        # The stand-in's logprobs, position by position: nothing was shifted or recomputed.
        assert logprobs[len(prompt) :] == [
            logprob(token, at) for at, token in enumerate(tokens[len(prompt) :])
        ]
        text = tokenizer.decode(tokens)
        assert text.startswith("<|im_start|>user\n")
        assert "<|im_end|>\n<|im_start|>assistant\n\\boxed{" in text
        assert text.endswith("}<|im_end|>")


def test_started_first_it_waits_for_all_and_ends_with_the_trainer(
    stack: Stack, tokenizer: Any
) -> None:
    environment = stack.start_environment(ARITHMETIC)
    stack.processes.wait_for_text(environment, "Waiting for inference server", 120)
    stack.start_inference(version=7)
    stack.processes.wait_for_text(environment, "Waiting for the rollout service", 120)
    stack.start_service()
    stack.register_trainer(num_steps=4)
    batches = stack.take_batches(4)
    stack.end_run()
    assert finished(environment) == 0
    assert "the trainer reached step 4: done" in log_of(environment)
    for batch in batches:
        assert sum(len(group["tokens"]) for group in batch) == 32
        for group in batch:
            check_group(group, tokenizer, 16)
            assert group["weight_versions"] == [7] * 16
            assert [told["temperature"] for told in group["sampling_params"]] == [1.0] * 16
            assert group["finish_reasons"] == ["stop"] * 16


def test_a_trainer_that_resumes_after_the_last_batch_finds_the_environment(
    stack: Stack, shared_inference: str
) -> None:
    """It died in its last step, with every batch handed out, and comes back from a checkpoint."""
    stack.use_inference(shared_inference)
    stack.start_service()
    stack.register_trainer(num_steps=3)
    environment = stack.start_environment(ARITHMETIC)
    stack.take_batches(3)
    stack.processes.wait_for_text(
        environment, "every batch up to step 3 is handed out: waiting for the trainer", 180
    )
    stack.register_trainer(num_steps=3, starting_step=1)
    stack.take_batches(2)
    stack.end_run()
    assert finished(environment) == 0
    assert log_of(environment).count("registered as arithmetic") == 1


def test_two_runs_in_a_row_on_one_service(stack: Stack, shared_inference: str) -> None:
    """Start each run in the guide's order: environment first, trainer last, while the service keeps
    running.
    """
    stack.use_inference(
        shared_inference, version=1
    )  # so that the second trainer gets none of these groups
    stack.start_service()
    first = stack.start_environment(ARITHMETIC, name="first")
    stack.register_trainer(num_steps=2)
    stack.take_batches(2)
    os.kill(
        first.command_pid(), signal.SIGSTOP
    )  # too busy to notice the end of its run before the next run begins
    stack.end_run()
    second = stack.start_environment(ARITHMETIC, name="second")
    third = stack.start_environment(ARITHMETIC, name="third")
    for waiting in second, third:
        stack.processes.wait_for_text(
            waiting, "run has ended; an environment that registers now waits for the next", 120
        )
    stack.control(version=0)
    for waiting in second, third:  # neither registers before the question below
        os.kill(waiting.command_pid(), signal.SIGSTOP)
    stack.register_trainer(num_steps=3)
    assert stack.next_batch() is None
    reason = httpx.get(f"{stack.service_url}/stats", timeout=60).json()["waiting_because"]
    assert "no environment is registered: start one" in reason
    for waiting in second, third:
        os.kill(waiting.command_pid(), signal.SIGCONT)
    for waiting in (
        second,
        third,
    ):  # one that registers after the end of this run would wait for a third one
        stack.processes.wait_for_text(waiting, "registered as arithmetic", 120)
    os.kill(first.command_pid(), signal.SIGCONT)
    assert finished(first) == 0, "before the second run ends too"
    stack.take_batches(3)
    stack.end_run()
    assert [finished(one) for one in (second, third)] == [0, 0]
    assert log_of(first).count("registered as arithmetic") == 1, (
        "an environment ends with its own run"
    )
    assert "the trainer reached step 3: done" not in log_of(first)
    for one in second, third:
        assert log_of(one).count("registered as arithmetic") == 1
        assert "training to step 3" in log_of(one)


def test_what_the_service_drops_is_counted_and_said(stack: Stack, shared_inference: str) -> None:
    stack.use_inference(shared_inference, version=2)
    stack.start_service()
    stack.register_trainer(num_steps=6, starting_step=5, max_staleness=1)
    assert stack.next_batch() is None
    environment = stack.start_environment(ARITHMETIC)
    stale = "the rollout service dropped 1 of 1 group(s): stale: sampled at weight version 2"
    stack.processes.wait_for_text(environment, stale, 120)
    stack.control(version=5)
    stack.take_batches(1)
    stack.end_run()
    assert finished(environment) == 0
    assert "dropped_by_service=" in log_of(environment)


def test_it_survives_a_new_service_that_does_not_know_it(
    stack: Stack, shared_inference: str
) -> None:
    stack.use_inference(shared_inference)
    service = stack.start_service()
    stack.register_trainer(num_steps=10)
    environment = stack.start_environment(ARITHMETIC)
    stack.take_batches(2)
    stack.processes.kill(service)
    stack.processes.wait_for_text(environment, "Waiting for the rollout service", 120)
    stack.start_service()
    stack.register_trainer(num_steps=3)
    stack.take_batches(3)
    stack.end_run()
    assert finished(environment) == 0
    assert log_of(environment).count("registered as arithmetic") == 2


def test_it_goes_on_after_a_killed_service_that_kept_its_store(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    stack.use_inference(shared_inference)
    store = tmp_path / "rollouts.db"
    service = stack.start_service(store)
    stack.register_trainer(num_steps=8)
    environment = stack.start_environment(ARITHMETIC)
    stack.take_batches(2)
    stack.processes.kill(service)
    stack.start_service(store)
    stack.take_batches(6)
    stack.end_run()
    assert finished(environment) == 0
    assert log_of(environment).count("registered as arithmetic") == 1


def test_it_survives_an_inference_server_that_is_started_again(stack: Stack) -> None:
    inference = stack.start_inference(version=1)
    stack.start_service()
    stack.register_trainer(num_steps=6)
    environment = stack.start_environment(ARITHMETIC)
    stack.take_batches(1)
    stack.processes.kill(inference)
    while stack.next_batch():
        pass  # what was sampled before the server died
    stack.processes.wait_for_text(environment, "cannot be reached", 120)
    stack.start_inference(version=2)
    newest = {
        version
        for batch in stack.take_batches(2)
        for group in batch
        for version in group["weight_versions"]
    }
    assert 2 in newest


@pytest.mark.parametrize("missing", ["inference", "service", "trainer"])
def test_what_never_comes_ends_it_with_one_clear_line(
    stack: Stack, shared_inference: str, missing: str
) -> None:
    if missing != "inference":
        stack.use_inference(shared_inference)
    if missing == "trainer":
        stack.start_service()
    environment = stack.start_environment(ARITHMETIC, "--env.service_timeout", "4")
    assert finished(environment) == 1
    last = log_of(environment).strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "giving up" in last
    assert {
        "inference": "--openai.base_url",
        "service": "--env.rollout_server_url",
        "trainer": "grpo.py",
    }[missing] in last
    assert "Traceback" not in log_of(environment)


def test_sigterm_stops_it_cleanly(stack: Stack, shared_inference: str) -> None:
    stack.use_inference(shared_inference)
    stack.start_service()
    stack.register_trainer(num_steps=1000)
    environment = stack.start_environment(ARITHMETIC)
    stack.take_batches(1)
    os.kill(environment.command_pid(), signal.SIGTERM)
    assert finished(environment) == 0
    assert "SIGTERM: stopping" in log_of(environment)
    assert "Traceback" not in log_of(environment)
    assert "disconnected environment 0" in log_of(environment)


def test_a_grader_that_fails_now_and_then_costs_retries_and_no_score(
    stack: Stack, shared_inference: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN_EVERY", "40")
    stack.use_inference(shared_inference)
    stack.start_service()
    stack.register_trainer(num_steps=3)
    environment = stack.start_environment(FAULTY)
    for batch in stack.take_batches(3):
        for group in batch:
            check_group(group, tokenizer, 16)
    stack.end_run()
    assert finished(environment) == 0
    log = log_of(environment)
    assert "RuntimeError: the grader broke" in log
    assert "Traceback" in log
    assert "errors_retried=" in log


def test_a_grader_that_always_fails_ends_it_and_sends_nothing(
    stack: Stack, shared_inference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN_EVERY", "1")
    stack.use_inference(shared_inference)
    stack.start_service()
    stack.register_trainer(num_steps=3)
    assert stack.next_batch() is None
    environment = stack.start_environment(FAULTY, "--env.max_consecutive_failures", "6")
    assert finished(environment) == 1
    log = log_of(environment)
    assert "error: the last" in log
    assert log.count("Traceback") == 1, "each attempt of each item fails in the same line"
    assert "RuntimeError: the grader broke (" in log
    assert "; traceback above)" in log
    assert stack.next_batch() is None


def test_a_stuck_item_is_cut_off_by_its_timeout(stack: Stack, shared_inference: str) -> None:
    stack.use_inference(shared_inference, delay=30.0)
    stack.start_service()
    stack.register_trainer(num_steps=2)
    assert stack.next_batch() is None
    environment = stack.start_environment(ARITHMETIC, "--env.worker_timeout", "3")
    stack.processes.wait_for_text(environment, "an item was cut off after ", 120)
    stack.control(delay=0.0)
    stack.take_batches(2)
    stack.end_run()
    assert finished(environment) == 0
    assert "timeout=" in log_of(environment)
