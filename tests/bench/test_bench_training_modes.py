"""training_modes.py: which rows of a run it judges."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from bench.training_modes import Run


def test_each_step_counts_once_also_where_its_weights_are_not_served(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    # Served after every second step; the third was done again after a kill.
    rows = [(1, 0, "a"), (2, 2, "b"), (3, 2, "lost"), (3, 2, "c"), (4, 4, "d")]
    written = [json.dumps({"step": step, "weight_version": version, "checksum": sum_}) for step, version, sum_ in rows]
    metrics.write_text("\n".join(written) + "\n", encoding="utf-8")
    run = SimpleNamespace(processes=SimpleNamespace(metrics=metrics))
    assert [row["checksum"] for row in Run.learned(run)] == ["a", "b", "c", "d"]  # type: ignore[arg-type]
