"""The products of experts, compared: the script under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.forked_commands import start_unguarded

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.nightly


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_every_candidate_computes_the_same_products(tmp_path: Path) -> None:
    script = ["bench/gpu/expert_products.py", "--output", str(tmp_path), "--tiny"]
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, *script, "--device", "cpu"]
        process = start_unguarded(command, log.fileno(), dict(os.environ), ROOT)
    assert process.wait(600) == 0, (tmp_path / "log").read_text()[-2000:]
    cases = json.loads((tmp_path / "expert_products.json").read_text())["cases"]
    assert len(cases) == 6
    for name, case in cases.items():
        rows = case["candidates"]
        assert len(rows) == (1 if name.startswith("layer") else 10), name
        assert all(row["repeats"] and row["ms"] > 0 for row in rows.values()), name
