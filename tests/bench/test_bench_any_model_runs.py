"""Whole runs of bench/any_model.py on the CPU: both tiers with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import any_model
from bench.gpu import speed_worker

pytestmark = pytest.mark.nightly


@pytest.mark.usefixtures("forked_children")
def test_both_tiers_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_model, "WORK", {"512": {}})
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--tiny", "--parts", "training"]
    assert any_model.main(arguments) == 0, capsys.readouterr().out
    data = json.loads((tmp_path / "any_model.json").read_text())
    assert data["machine"]["vllm"]
    assert data["ratios"]["512"].keys() == any_model.COMPARED.keys()
    assert data["training"]["512"]["2"]["arithmetic"] == speed_worker.TRANSFORMERS


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_children")
def test_the_second_tier_is_served_by_a_learned_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--tiny", "--parts", "serving"]
    assert any_model.main([*arguments, "--tiers", "2"]) == 0, capsys.readouterr().out
    (row,) = json.loads((tmp_path / "any_model.json").read_text())["serving"].values()
    assert row["model"] == "TransformersModel"
    assert row["update"]["updates"] == 2
    assert abs(row["compared"]["kl"]) < 1e-6
    assert row["compared"]["tokens"] > 0
    assert "learned from vLLM's loader" in (tmp_path / "vllm-2.log").read_text()
