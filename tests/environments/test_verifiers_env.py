"""Environments of the verifiers package, the real one: rollouts of one turn, of several, with
tools; and rewards that fail.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from environments.verifiers_server import as_messages, load
from tests.atroposlib.envs.env_stack import OFFLINE, Stack

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "environments" / "verifiers_server.py"
EXAMPLES = Path(__file__).with_name("verifiers_examples.py")
PYTHON = os.environ.get("LOCKSTEP_VERIFIERS_PYTHON") or (
    sys.executable if importlib.util.find_spec("verifiers") else ""
)
needs_the_package = pytest.mark.skipif(
    not PYTHON,
    reason="LOCKSTEP_VERIFIERS_PYTHON names no interpreter that has the verifiers package (docs/environments.md)",
)
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 1}}\n</tool_call>'


def run(stack: Stack, kind: str, command: str, *flags: str) -> Any:
    words = [
        PYTHON,
        str(SERVER),
        command,
        "--env.environment",
        str(EXAMPLES),
        "--env.environment_args",
        json.dumps({"kind": kind}),
    ]
    words += ["--openai.base_url", f"{stack.inference_url}/v1", *flags]
    return stack.processes.start("verifiers", words, OFFLINE, may_finish=True)


@pytest.mark.e2e
@needs_the_package
@pytest.mark.parametrize(
    ("kind", "cycle", "scores", "turns"),
    [
        ("single", ["2", "3"], [0.0, 0.0, 1.0, 1.0], 1),
        ("again", ["2"], [1.0] * 4, 2),
        ("tool", [CALL, "2"], [1.0], 2),
    ],
)
def test_rollouts_have_their_rewards_and_the_very_tokens(
    stack: Stack,
    shared_inference: str,
    tmp_path: Path,
    tokenizer: Any,
    kind: str,
    cycle: list[str],
    scores: list[float],
    turns: int,
) -> None:
    stack.use_inference(shared_inference, cycle=cycle)
    saved = tmp_path / "groups.jsonl"
    flags = (
        "--env.group_size",
        str(len(scores)),
        "--env.total_steps",
        "1",
        "--env.data_path_to_save_groups",
        str(saved),
    )
    stack.processes.finish(
        run(
            stack,
            kind,
            "process",
            *flags,
            "--env.max_num_workers",
            "1",
            "--env.ensure_scores_are_not_same",
            "false",
        ),
        240,
    )
    stack.control(cycle=None)
    group = json.loads(saved.read_text().splitlines()[0])
    assert sorted(group["scores"]) == scores
    for tokens, masks, logprobs, score in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], group["scores"], strict=True
    ):
        sampled = [token for token in masks if token != -100]
        said = tokenizer.decode(sampled).split("<|im_end|>")
        assert len(said) == turns + 1, "each turn ends once"
        assert (said[turns - 1].strip() == "2") == (score == 1.0)
        assert [token for token, mask in zip(tokens, masks, strict=True) if mask != -100] == sampled
        assert all(
            (logprob == 1.0) == (mask == -100)
            for logprob, mask in zip(logprobs, masks, strict=True)
        )
        text = tokenizer.decode(tokens)
        assert ("Are you sure?" in text) == (kind == "again")
        assert ("<|im_start|>tool\n2" in text) == (kind == "tool")


@pytest.mark.e2e
@needs_the_package
def test_a_reward_function_that_fails_is_no_score_and_an_evaluation_counts_what_is_right(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    stack.use_inference(shared_inference, text="62")
    output = tmp_path / "result.json"
    evaluate = run(stack, "single", "evaluate", "--env.eval_output", str(output))
    saved = tmp_path / "groups.jsonl"
    flags = (
        "--env.total_steps",
        "1",
        "--env.data_path_to_save_groups",
        str(saved),
        "--env.max_consecutive_failures",
        "2",
    )
    broken = run(stack, "broken", "process", *flags, "--env.rollout_retries", "0")
    stack.processes.finish(evaluate, 240)
    result = json.loads(output.read_text())
    assert (result["num_problems"], result["correct"]) == (10, 1), "31 plus 31"
    stack.processes.wait_for_text(
        broken, "Error calling reward function broken: 'no such thing'", 240
    )
    stack.control(text=None)
    assert not saved.exists() or not saved.read_text()


def test_without_the_package_one_line_says_how_to_have_it() -> None:
    if importlib.util.find_spec("verifiers"):
        pytest.skip("this interpreter has the package")
    with pytest.raises(
        Exception,
        match=r"verifiers package is not installed.*runs/verifiers/bin/pip install -e '\.\[verifiers\]'",
    ):
        load("x", {})


def test_messages_of_theirs_are_tables_models_or_one_text() -> None:
    class Model:
        def model_dump(self, exclude_none: bool) -> dict[str, str]:
            return {"role": "assistant", "content": "yes"}

    assert as_messages("hello") == [{"role": "user", "content": "hello"}]
    assert as_messages([{"role": "user", "content": "a"}, Model()])[1] == {
        "role": "assistant",
        "content": "yes",
    }
    assert as_messages(None) == []
