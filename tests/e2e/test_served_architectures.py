"""Models of many architectures: vLLM has transformers' logprobs, also after an update."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.models import load_model
from tests.conftest import ROOT
from tests.tiny_models import SERVED, make_served

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
ROUNDING = {"Apertus": 5e-3, "Gemma2": 2e-2}
"""Apertus has factors in bfloat16 in vLLM, and Gemma 2 caps scores by an approximation there."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of each architecture, and with the results of vLLM."""
    folder = tmp_path_factory.mktemp("served")
    for name in SERVED:
        for seed, kind in enumerate(("old", "new")):
            make_served(name, folder / name / kind, seed)
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.serve_architectures", str(folder), *SERVED],
        cwd=ROOT,
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=1400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def largest_difference(model: Any, rows: list[list[Any]]) -> float:
    """Return the largest difference of logprobs between a model and vLLM."""
    worst = 0.0
    for tokens, theirs in rows:
        with torch.no_grad():
            ours = model.logits(torch.tensor([tokens]))[0].log_softmax(-1)
        chosen = ours[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        worst = max(worst, float((chosen - torch.tensor(theirs)).abs().max()))
    return worst


@pytest.mark.parametrize("name", SERVED)
def test_vllm_has_the_logprobs_of_the_trainer_before_and_after_an_update(
    name: str, served: Path
) -> None:
    result = json.loads((served / name / "result.json").read_text())
    assert "error" not in result, result["error"][-2000:]
    assert result["taken"] == result["held"]
    old, new = (load_model(str(served / name / kind), torch.float32) for kind in ("old", "new"))
    allowed = ROUNDING.get(name, 1e-4)
    assert largest_difference(old, result["old"]) < allowed
    assert largest_difference(new, result["new"]) < allowed
    assert largest_difference(old, result["new"]) > 0.5, "old weights would be seen"
