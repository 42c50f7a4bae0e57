"""simple_rl.py as a user runs it: vLLM as its child, on one copy of the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from tests.conftest import ROOT, Processes
from tests.forked_commands import FORK_CHILDREN, run_command

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

SCRIPT = str(ROOT / "example_trainer" / "simple_rl.py")
STEPS = 3


def test_on_a_cpu_it_trains_the_starter_model_and_sees_other_bits(
    processes: Processes, tmp_path: Path
) -> None:
    """Neither model nor problems nor output are named, as in the guide. vLLM's ordinary kernels
    sample, so the comparison finds differences. The second and the third batch are one step old,
    which the comparison knows. Held-out problems are answered."""
    command = [
        sys.executable,
        "-u",
        SCRIPT,
        "--device",
        "cpu",
        "--steps",
        str(STEPS),
        "--groups",
        "2",
        "--group-size",
        "4",
    ]
    command += [
        "--max-tokens",
        "24",
        "--staleness",
        "1",
        "--evaluate-every",
        "2",
        "--held-out",
        "4",
        "--loss",
        "cispo",
    ]
    run = tmp_path / "outputs" / "rl_training"  # where the guide has TensorBoard look
    text = processes.finish(
        processes.start("simple-rl", command, FORK_CHILDREN, tmp_path), seconds=280
    )
    (chosen,) = (
        line
        for line in text.splitlines()
        if "Training the starter model on sums with ordinary kernels" in line
    )
    assert "not Qwen/Qwen3-1.7B on openai/gsm8k: --device is cpu" in chosen
    assert f"Step {STEPS}/{STEPS}  reward " in text
    assert "bitwise determinism verified" not in text, "only a run that checked it may say so"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert [(row["age_mean"], row["age_max"]) for row in rows] == [(0.0, 0), (1.0, 1), (1.0, 1)]
    evaluations = [
        json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    assert [row["weight_version"] for row in evaluations] == [0, 2, 3]
    assert all(0 <= row["metrics"]["solved"] <= 1 for row in evaluations)
    compared, mismatched = (
        sum(row[name] for row in rows) for name in ("compared_tokens", "mismatched_tokens")
    )
    assert compared == rows[0]["tokens"]
    assert sum(row["older_tokens"] for row in rows) == rows[1]["tokens"] + rows[2]["tokens"]
    assert mismatched > compared / 4, "if so few tokens differed, equal bits would prove little"
    assert (
        f"{mismatched} of {compared} tokens have another logprob in the trainer than in vLLM"
        in text
    )
    assert max(row["max_logprob_difference"] for row in rows) < 1e-3, (
        "other bits, but the same model and weights"
    )
    for row in rows:
        assert row["perplexity_rollout"] != row["perplexity_trainer"]
    assert abs(rows[0]["perplexity_rollout"] - rows[0]["perplexity_trainer"]) < 1e-2
    assert 0 < rows[0]["mismatch_kl"] < 1e-6
    assert [row["mismatch_kl"] for row in rows[1:]] == [None, None], (
        "older weights are staleness, not mismatch"
    )
    assert abs(rows[0]["ratio_max"] - 1) < 1e-3
    assert len({row["weights_sha"] for row in rows}) == STEPS
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for tag in ("train/reward_mean", "train/entropy", "train/mismatched_tokens"):
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3]
    saved = run / "checkpoints" / f"step_{STEPS}"
    assert f"Saved checkpoint outputs/rl_training/checkpoints/step_{STEPS}" in text
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (ROOT / "assets" / "starter_model", saved)
    )
    assert before.keys() == after.keys()
    assert all(
        (before[name] != after[name]).any()
        for name in ("model.embed_tokens.weight", "model.norm.weight")
    )
    assert AutoTokenizer.from_pretrained(saved).chat_template, (
        "vLLM and the trainer can start from it"
    )


def test_without_a_gpu_equal_bits_that_are_asked_for_end_with_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        SCRIPT,
        "--batch-invariant",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "run"),
    ]
    result = run_command(command)
    assert result.returncode == 2
    assert result.stdout.splitlines()[-1].endswith("give --no-batch-invariant here")
    assert "Traceback" not in result.stdout
