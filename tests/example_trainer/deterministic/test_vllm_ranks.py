"""A trainer of any layout beside tensor-parallel ranks of vLLM: equal bits forward, and the
gradients of the whole model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Processes

WORKER = Path(__file__).with_name("vllm_rank_worker.py")
LAYOUTS = {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
"""Ranks of the server, ranks of the trainer."""


@pytest.mark.e2e
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-6), ("bfloat16", 0.05)])
def test_every_layout_has_the_bits_of_the_server(
    dtype: str, limit: float, processes: Processes, tmp_path: Path
) -> None:
    """bf16 gradients are rounded at each step of the backward pass."""
    command = [sys.executable, "-m", "tests.forked_ranks", WORKER, dtype, str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "FORKED_RANKS": "4"}
    process = processes.start("ranks", command, environment=environment, may_finish=True)
    assert process.guard.wait(timeout=240) == 0, process.log_path.read_text()
    for rank in range(4):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        names = {f"server {n}, trainer {m}" for n, m in LAYOUTS if m > rank}
        assert len(results) == 2
        for model, result in results.items():
            assert result["differing"] == dict.fromkeys(names, 0), model
            assert result["errors"].keys() == names
            assert all(error < limit for error in result["errors"].values()), (model, result)
            assert result["changed by the plan"] > 0, "else the plan is not tested"
