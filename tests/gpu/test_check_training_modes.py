"""training_modes.py: which rows of a run it judges, and where its processes are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu.check_training_modes import MODES, Run, ranks_in


def test_each_step_counts_once_also_where_its_weights_are_not_served(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    # Served after every second step; the third was done again after a kill.
    rows = [(1, 0, "a"), (2, 2, "b"), (3, 2, "lost"), (3, 2, "c"), (4, 4, "d")]
    written = [
        json.dumps({"step": step, "weight_version": version, "checksum": sum_})
        for step, version, sum_ in rows
    ]
    metrics.write_text("\n".join(written) + "\n", encoding="utf-8")
    run = SimpleNamespace(processes=SimpleNamespace(metrics=metrics))
    assert [row["checksum"] for row in Run.learned(run)] == ["a", "b", "c", "d"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gpus", "trainer"),
    [
        ("broadcast_direct", 1, "0"),
        ("broadcast_tp2_fsdp2", 2, "1,0"),  # each rank to the other GPU
        ("broadcast_two_servers", 2, "1"),
        ("broadcast_two_servers", 3, "2"),
        ("broadcast_fsdp2", 2, "0,1"),
        ("single_copy_tp2", 2, "0,1"),
    ],
)
def test_a_trainer_without_gpus_of_its_own_is_put_on_vllm_s(
    name: str, gpus: int, trainer: str
) -> None:
    mode = MODES[name].on(gpus)
    assert mode.trainer_gpus == trainer
    assert mode.gpus_needed <= gpus


def test_what_does_not_fit_is_left_out() -> None:
    assert MODES["single_copy_tp2"].on(1).gpus_needed == 2
    assert MODES["broadcast_two_servers"].on(1).gpus_needed == 2


def test_ranks_are_counted_by_the_trainers_log(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("07:53:11 [Bridge] Broadcast\n")
    assert ranks_in(log) == 1
    log.write_text(
        "07:53:11 [Ranks] Starting 2 ranks, one for each of vLLM's at http://localhost:9001\n"
    )
    assert ranks_in(log) == 2
