"""Two ranks of FSDP2 add the gradients of a bfloat16 model over bins and ranks in float32."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from example_trainer.models import save_model
from tests.conftest import ROOT, Processes
from tests.example_trainer.parallel.spread_cases import make_geometry, make_whole
from tests.example_trainer.parallel.test_spread_training import hugging_face_config

pytestmark = pytest.mark.e2e

SEEDS = (1, 2, 3, 5)
"""Seeds of spread_cases.make_geometry: every architecture, tied and untied."""


def test_gradients_of_two_ranks_are_the_float32_sum_of_one_process(
    processes: Processes, tmp_path: Path
) -> None:
    assert {make_geometry(seed).tie_word_embeddings for seed in SEEDS} == {False, True}
    for seed in SEEDS:
        folder = tmp_path / f"model-{seed}"
        save_model(make_whole(make_geometry(seed), seed), folder)
        (folder / "config.json").write_text(json.dumps(hugging_face_config(seed)))
    worker = Path(__file__).with_name("gradient_worker.py")
    command = [sys.executable, "-m", "tests.forked_ranks", worker, tmp_path, *map(str, SEEDS)]
    processes.finish(
        processes.start("gradients", command, environment={"PYTHONPATH": str(ROOT)}), seconds=240
    )
