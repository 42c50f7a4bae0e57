"""The comparison of plan and use, on the CPU: mechanics alone, the figures come from a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.measured import COMMIT_VARIABLE
from tests.gpu import check_memory_plan


@pytest.mark.usefixtures("forked_children")
def test_a_tiny_configuration_is_planned_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    status = check_memory_plan.main(
        ["--output", str(tmp_path), "--device", "cpu", "--only", "reference_1.7b"]
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    written = json.loads((tmp_path / "memory_plan.json").read_text())
    (row,) = written["results"]
    assert row["measured"]["commit"] == "abc"
    assert row["allocated"].keys() - {"end of the forward pass"} == row["planned"].keys()
    parts = (
        "backward of the loss",
        "backward of the layers",
        "end of the backward pass",
        "optimizer",
        "update of the server",
    )
    assert row["allocated"]["greatest"] == max(row["allocated"][part] for part in parts)
    assert (
        row["allocated"]["after connecting"] > row["allocated"]["after loading"]
    )  # columns for vLLM's two ranks
    assert "backward of the loss" in printed


def test_the_plan_was_right_on_gpus() -> None:
    """Compare the committed bytes: at the greatest moment, and wherever a step may be at its
    greatest.
    """
    rows = json.loads(
        (Path(__file__).resolve().parents[2] / "bench" / "results" / "memory_plan.json").read_text()
    )["results"]
    assert {"full", "offload", "lora", "fsdp2"} <= {
        row["configuration"]["name"].partition("_")[0] for row in rows
    }
    for row in rows:
        shared = row["planned"].keys() & row["allocated"].keys()
        assert {
            key: row["planned"][key] / row["allocated"][key] for key in shared
        } == pytest.approx(dict.fromkeys(shared, 1.0), abs=0.1), row["configuration"]["name"]
