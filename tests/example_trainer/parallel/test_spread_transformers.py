"""Spread over two ranks by FSDP2, a model of transformers is trained as in one process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.models import load_model
from tests.conftest import ROOT, Processes
from tests.example_trainer.models.transformers_cases import checkpoint
from tests.example_trainer.parallel.spread_cases import (
    make_config,
    make_optimizer,
    take_steps,
    whole_state,
)

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

SEEDS = {
    "Mixtral": 101,
    "Gemma2": 102,
    "Qwen3Next": 103,
    "Qwen2_5_VL": 105,
    "DeepseekV3": 106,
    "Cohere": 107,
}
"""Seeds of make_config: together with a reference, layers computed again, and several updates."""
WORKER = Path(__file__).resolve().parent / "spread_worker.py"


def test_two_ranks_train_as_one_process_does(processes: Processes, tmp_path: Path) -> None:
    for name, seed in SEEDS.items():
        shutil.copytree(checkpoint(name), tmp_path / f"model-{seed}")
    seeds = map(str, SEEDS.values())
    command = [sys.executable, "-m", "tests.forked_ranks", WORKER, "fsdp", tmp_path, *seeds]
    started = processes.start("fsdp", command, environment={"PYTHONPATH": str(ROOT)})
    processes.finish(started, seconds=480)
    for name, seed in SEEDS.items():
        model, reference = (load_model(str(checkpoint(name)), torch.float32) for _ in range(2))
        before = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
        config = make_config(seed)
        optimizer = make_optimizer(model, config)
        figures = take_steps(model, optimizer, reference, config, seed)
        rows = json.loads((tmp_path / f"fsdp-{seed}.json").read_text())
        for one, many in zip(figures, rows, strict=True):
            assert many == pytest.approx(one, rel=1e-4, abs=2e-6), name
        weights = {f"weight.{key}": model.get_parameter(key).detach() for key in before}
        expected = whole_state(optimizer) | weights
        spread = load_file(tmp_path / f"fsdp-{seed}.safetensors")
        assert spread.keys() == expected.keys()
        for key, tensor in expected.items():
            difference = float((spread[key] - tensor).abs().max())
            assert difference < 2e-6 + 1e-5 * float(tensor.abs().max()), (name, key)
        for key, tensor in before.items():
            assert not torch.equal(expected[f"weight.{key}"], tensor), (name, key)
