"""The blocks of the gradient kernels, compared: the script under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from bench.gpu import gradient_kernels
from tests.forked_commands import start_unguarded

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.nightly


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_every_candidate_computes_the_same_gradients(tmp_path: Path) -> None:
    script = ["bench/gpu/gradient_kernels.py", "--output", str(tmp_path), "--tiny"]
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, *script, "--device", "cpu", "--seconds", "500"]
        process = start_unguarded(command, log.fileno(), dict(os.environ), ROOT)
    assert process.wait(600) == 0, (tmp_path / "log").read_text()[-2000:]
    cases = json.loads((tmp_path / "gradient_kernels.json").read_text())["cases"]
    assert len(cases) == 17
    for name, case in cases.items():
        rows = case["candidates"]
        # No descriptor can name the tiny head: its rows do not begin at multiples of 16 bytes.
        number = {"attention": 2, "head": 3}.get(name.split(",")[0], 7 if "expert" in name else 9)
        assert len(rows) == number, name
        assert all(row["repeats"] and row["ms"] > 0 for row in rows.values()), name


def test_lengths_that_are_ragged_add_up() -> None:
    lengths = gradient_kernels.ragged(16384)
    assert sum(lengths) == 16384
    assert max(lengths) <= 2048
    assert any(length % 64 for length in lengths)
