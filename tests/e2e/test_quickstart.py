"""The quick start with the real stack, cut to three steps: it measures, trains, measures again, and leaves what it promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import Processes
from tests.forked_commands import FORK_CHILDREN

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

PROMISED = {"eval_before", "eval_after", "steps", "weight_updates", "params_mapped", "params_total", "bridge"}
PROMISED |= {"seconds_setup", "seconds_train"}


def test_three_steps_leave_everything_that_is_promised(processes: Processes, tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "scripts.quickstart",
        "--cpu",
        "--steps",
        "3",
        "--bridge",
        "single-copy",
        "--output",
        output,
    ]
    said = processes.finish(processes.start("quickstart", command, FORK_CHILDREN), 400)

    summary = json.loads((output / "summary.json").read_text())
    assert summary.keys() >= PROMISED
    assert (summary["steps"], summary["weight_updates"], summary["bridge"]) == (3, 3, "single-copy")
    assert summary["params_mapped"] == summary["params_total"] > 0
    assert summary["eval_problems"] >= 200
    assert summary["eval_before"] <= 0.60
    assert "step 3/3" in said
    for path in ("reward.png", "trainer/tensorboard", "logs/vllm.log", "commands.sh"):
        assert (output / path).exists(), path
    assert f"view-run {output}" in said.replace("\n", "")
