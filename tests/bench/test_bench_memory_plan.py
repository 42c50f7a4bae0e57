"""The comparison of plan and use, on the CPU: mechanics alone, the figures come from a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.measured import COMMIT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_configuration_is_planned_measured_and_written_down(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "memory_plan.py"), "--output", str(tmp_path), "--device", "cpu",
         "--only", "reference_1.7b"],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | {COMMIT_VARIABLE: "abc"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "memory_plan.json").read_text())
    (row,) = written["results"]
    assert row["measured"]["commit"] == "abc"
    assert row["allocated"].keys() - {"end of the forward pass"} == row["planned"].keys()
    parts = ("backward of the loss", "backward of the layers", "end of the backward pass", "optimizer", "update of the server")
    assert row["allocated"]["greatest"] == max(row["allocated"][part] for part in parts)
    assert row["allocated"]["after connecting"] > row["allocated"]["after loading"]  # columns for vLLM's two ranks
    assert "backward of the loss" in done.stdout
