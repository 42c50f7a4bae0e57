"""The comparison of optimizer choices, on the CPU: mechanics alone, the figures come from a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import optimizer_choices
from bench.measured import COMMIT_VARIABLE

pytestmark = pytest.mark.nightly


@pytest.mark.usefixtures("forked_children")
def test_a_tiny_choice_is_planned_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    status = optimizer_choices.main(
        ["--output", str(tmp_path), "--device", "cpu", "--only", "1.7B, adamw-8bit, offloaded"]
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    (row,) = json.loads((tmp_path / "optimizer_choices.json").read_text())["results"]
    assert row["measured"]["commit"] == "abc"
    assert row["choice"]["optimizer"] == "adamw-8bit"
    assert row["bytes"]["planned"] > row["host_bytes"]["planned"] > 6 * row["trained_parameters"]
    assert row["bytes"]["measured"] > row["host_bytes"]["planned"]
    assert min(row["seconds"][part]["min"] for part in ("gradient", "update", "write_weights")) > 0
    assert "1.7B, adamw-8bit, offloaded" in printed


def test_a_choice_that_does_not_fit_is_skipped_with_its_reason() -> None:
    large = replace(optimizer_choices.CHOICES[-2], shape="qwen2.5-72b", device="cpu")
    assert "of host memory; " in str(optimizer_choices.refusal(large))
