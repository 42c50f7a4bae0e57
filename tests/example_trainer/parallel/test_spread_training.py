"""Spread over two ranks, by FSDP2, as vLLM splits layers or by experts, a model is trained exactly as in one
process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.models import load_model, save_model
from example_trainer.models.hf_checkpoint import read_geometry
from tests.conftest import ROOT, Processes
from tests.example_trainer.parallel.spread_cases import (
    MIXTURE,
    make_config,
    make_geometry,
    make_optimizer,
    make_whole,
    take_steps,
    whole_state,
)

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

HERE = Path(__file__).resolve().parent
SEEDS = (1, 2, 3, 5, 7, 8, 9, MIXTURE)
"""Names in cases.make_geometry: together they have every kind of layer, shared and own key/value
heads, tied and untied.
"""
KINDS = {"fsdp": SEEDS, "tensor_parallel": SEEDS, "expert_parallel": (MIXTURE,)}


def hugging_face_config(seed: int) -> dict[str, object]:
    g = make_geometry(seed)
    experts = {}
    if g.num_experts:
        experts = {
            "num_experts": g.num_experts,
            "num_experts_per_tok": g.experts_per_token,
            "moe_intermediate_size": g.moe_intermediate_size,
            "norm_topk_prob": g.norm_topk_prob,
        }
    return experts | {
        "architectures": [g.architecture],
        "vocab_size": g.vocab_size,
        "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size,
        "num_hidden_layers": g.num_layers,
        "num_attention_heads": g.num_heads,
        "num_key_value_heads": g.num_kv_heads,
        "head_dim": g.head_dim,
        "max_position_embeddings": g.max_positions,
        "rms_norm_eps": g.rms_norm_eps,
        "rope_theta": g.rope_theta,
        "attention_bias": g.o_bias,
        "mlp_bias": g.mlp_bias,
        "tie_word_embeddings": g.tie_word_embeddings,
    }


@dataclass
class Case:
    """A checkpoint, and what one process makes of it."""

    before: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    figures: list[dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case's checkpoint."""
    folder = tmp_path_factory.mktemp("spread")
    for seed in SEEDS:
        save_model(make_whole(make_geometry(seed), seed), folder / f"model-{seed}")
        (folder / f"model-{seed}" / "config.json").write_text(json.dumps(hugging_face_config(seed)))
        assert read_geometry(folder / f"model-{seed}")[0] == make_geometry(seed)
    return folder


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[int, Case]:
    """Every case, trained in this process."""
    results = {}
    for seed in SEEDS:
        config = make_config(seed)
        model, reference = (
            load_model(str(folder / f"model-{seed}"), torch.float32) for _ in range(2)
        )
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = make_optimizer(model, config)
        figures = take_steps(model, optimizer, reference, config, seed)
        weights = {
            f"weight.{name}": parameter.detach() for name, parameter in model.named_parameters()
        }
        results[seed] = Case(before, whole_state(optimizer) | weights, figures)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_process_does(
    kind: str, processes: Processes, folder: Path, cases: dict[int, Case]
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.forked_ranks",
        HERE / "spread_worker.py",
        kind,
        folder,
        *map(str, KINDS[kind]),
    ]
    processes.finish(
        processes.start(kind, command, environment={"PYTHONPATH": str(ROOT)}), seconds=480
    )
    for seed in KINDS[kind]:
        case = cases[seed]
        for one, many in zip(
            case.figures, json.loads((folder / f"{kind}-{seed}.json").read_text()), strict=True
        ):
            assert many == pytest.approx(one, rel=1e-4, abs=2e-6), f"case {seed}"
        found = load_file(folder / f"{kind}-{seed}.safetensors")
        assert found.keys() == case.expected.keys()
        for name, tensor in case.expected.items():
            difference = float((found[name] - tensor).abs().max())
            assert difference < 2e-6 + 1e-5 * float(tensor.abs().max()), (
                f"case {seed}: {name} differs by {difference}"
            )
        for name, tensor in case.before.items():
            moved = float((case.expected[f"weight.{name}"] - tensor).abs().max())
            assert moved > 1e-4, f"{name} was not trained: the comparison is empty"
