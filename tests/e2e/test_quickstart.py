"""The quick start with the real stack, cut to six steps: it measures, trains, measures again, and
leaves what it promises.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Processes
from tests.e2e.quickstart_run import EVAL_SIZE, start_quickstart

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

STEPS = 6
PROMISED = {
    "eval_before",
    "eval_after",
    "steps",
    "weight_updates",
    "params_mapped",
    "params_total",
    "bridge",
}
PROMISED |= {"seconds_setup", "seconds_train"}


def test_a_short_run_leaves_everything_that_is_promised(
    processes: Processes, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    said = processes.finish(start_quickstart(processes, STEPS, output), 400)

    summary = json.loads((output / "summary.json").read_text())
    assert summary.keys() >= PROMISED
    assert (summary["steps"], summary["weight_updates"], summary["bridge"]) == (
        STEPS,
        STEPS,
        "single-copy",
    )
    assert summary["params_mapped"] == summary["params_total"] > 0
    assert summary["eval_problems"] == EVAL_SIZE
    assert summary["eval_before"] <= 0.60
    assert f"step {STEPS}/{STEPS}" in said
    for path in ("reward.png", "trainer/tensorboard", "logs/vllm.log", "commands.sh"):
        assert (output / path).exists(), path
    assert f"view-run {output}" in said.replace("\n", "")
