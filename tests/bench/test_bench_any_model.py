"""The cases, the server without a row, and the figures of bench/any_model.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import any_model
from bench.gpu import machine, speed_worker, unlisted
from bench.gpu.speed_worker import Case
from bench.gpu.synthetic import geometry_of
from example_trainer.models.transformers_model import TransformersModel
from vllm_patching.weights import families

CPU = torch.device("cpu")


def test_the_second_tier_has_the_work_of_the_first_without_shared_prompts() -> None:
    for name, tiers in any_model.cases("qwen3-1.7b").items():
        one, other = (tiers[tier].__dict__ for tier in (1, 2))
        different = {key for key in one if one[key] != other[key]}
        assert different == {"arithmetic"} | ({"share"} if name == "groups of 8" else set())


def test_a_case_through_transformers_has_transformers_class() -> None:
    case = Case(speed_worker.TRANSFORMERS, "tiny", device="cpu")
    model = speed_worker.model_of(case, geometry_of("tiny", 8192), torch.float32, CPU)
    assert isinstance(model, TransformersModel)
    assert model.geometry.max_positions == 8192
    assert float(model.state_dict()["model.norm.weight"].min()) == 1.0
    assert model.way == "packed"


def test_a_ratio_is_of_the_second_tier_over_the_first_one() -> None:
    def row(rate: float, peak: int) -> dict[str, Any]:
        return {"pass": {"sequence_tokens_per_second": rate, "peak_bytes": peak}}

    training = {"512": {"1": row(200.0, 10), "2": row(50.0, 20)}, "4k": {"1": row(1.0, 1)}}
    data = {"training": training | {"long": {"1": {"skipped": "no time"}}}}
    assert any_model.ratios(data) == {"512": {"tokens_per_second": 0.25, "peak_bytes": 2.0}}
    text = any_model.report(data)
    assert "512, decoder of ours" in text
    assert "long, decoder of ours: {'skipped': 'no time'}" in text


def test_an_architecture_is_taken_off_the_table_of_a_server_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    monkeypatch.delenv(unlisted.ARCHITECTURE, raising=False)
    unlisted.install()
    assert "Qwen3ForCausalLM" in families.FAMILIES
    variables = unlisted.server_variables("Qwen3ForCausalLM")
    monkeypatch.setenv(unlisted.ARCHITECTURE, variables[unlisted.ARCHITECTURE])
    unlisted.install()
    assert "Qwen3ForCausalLM" not in families.FAMILIES
    assert "Qwen2ForCausalLM" in families.FAMILIES


@pytest.mark.parametrize(
    ("version", "ending"),
    [
        ("0.33.0", "_vllm033"),
        ("0.9.1.dev3+g12", "_vllm009"),
        ("1.2", "_vllm102"),
        ("not installed", "_without_vllm"),
    ],
)
def test_a_results_file_ends_with_the_version(
    version: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_vllm_version", lambda: version)
    assert machine.version_ending() == ending
