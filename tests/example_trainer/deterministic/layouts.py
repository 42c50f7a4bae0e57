"""Small models for trainers of several ranks, and the command of layout_worker.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from example_trainer.models import Geometry, save_model
from tests.example_trainer.deterministic.training import decoder_for
from tests.geometries import config_of

WORKER = Path(__file__).with_name("layout_worker.py")
ROOT = Path(__file__).resolve().parents[3]
MODELS: dict[str, dict[str, Any]] = {
    "untied": config_of("Qwen3", 2, 32, 36, 2, 1, 8, 61, tie_word_embeddings=False),
    # So few tokens that two of four ranks have rows of padding alone.
    "tied": config_of("Llama", 2, 32, 20, 4, 1, 8, 29, tie_word_embeddings=True),
    "mixture": config_of("Qwen3Moe", 2, 32, 16, 2, 1, 8, 61, tie_word_embeddings=False),
    "four layers of 0.6B": config_of(
        "Qwen3", 4, 1024, 3072, 16, 8, 128, 32000, tie_word_embeddings=True
    ),
    "two layers of a mixture": config_of(
        "Qwen3Moe",
        2,
        1024,
        3072,
        16,
        8,
        128,
        32000,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
}


def write_model(folder: Path, name: str) -> None:
    """Write a model with random weights in bf16, with the name `model`."""
    described = MODELS[name] | {"max_position_embeddings": 256}
    model = decoder_for("cpu", 3, Geometry.from_config(described)).to(torch.bfloat16)
    save_model(model, folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(described))


def ranks_command(*arguments: object) -> list[str]:
    """The command that starts the ranks; see layout_worker.py. FORKED_RANKS is their number."""
    return [sys.executable, "-m", "tests.forked_ranks", str(WORKER), *map(str, arguments)]


def written(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The results of each rank."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
