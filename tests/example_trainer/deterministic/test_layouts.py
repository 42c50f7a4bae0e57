"""A deterministic trainer of several ranks. It has the forward bits of one rank, and equal weights
whenever the run is repeated, also after a rank was killed. All ranks have one error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.models.shards import sum_in_order
from tests.conftest import ROOT, Processes
from tests.example_trainer.deterministic.layouts import ranks_command, write_model, written

pytestmark = pytest.mark.nightly


def run(
    processes: Processes, ranks: int, arguments: list[object], fails: bool = False
) -> list[dict[str, Any]]:
    """Run the ranks; return what each has written."""
    environment = {"PYTHONPATH": str(ROOT), "FORKED_RANKS": str(ranks)}
    command = ranks_command(*arguments)
    process = processes.start("ranks", command, environment=environment, may_finish=True)
    status = process.guard.wait(timeout=240)
    assert (status != 0) == fails, process.log_path.read_text()
    return [] if fails else written(Path(str(arguments[1])), ranks)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "ranks", "name"),
    [
        ("fsdp1", 3, "untied"),
        ("tensor_parallel2", 2, "untied"),
        ("experts1", 2, "mixture"),
        ("shared_fsdp2", 2, "untied"),
    ],
)
def test_a_killed_run_has_the_bits_of_one_that_was_not(
    kind: str, ranks: int, name: str, processes: Processes, tmp_path: Path
) -> None:
    """The worker compares each token with the whole model's."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_model(folder, name)
    first, *others = run(processes, ranks, [kind, whole, 3])
    assert len({first["1"], first["2"], first["3"]}) == 3, "every step changes the weights"
    assert all(other == first for other in others)
    run(processes, ranks, [kind, killed, 3, "kill"], fails=True)
    resumed = run(processes, ranks, [kind, killed, 3])
    assert resumed == [{"2": first["2"], "3": first["3"]}] * ranks


@pytest.mark.e2e
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 2), ("tensor_parallel4", 2)])
def test_one_bit_of_one_rank_stops_all_with_one_error(
    kind: str, ranks: int, processes: Processes, tmp_path: Path
) -> None:
    write_model(tmp_path, "untied")
    results = run(processes, ranks, [kind, tmp_path, 2, "bit"])
    assert all(result == results[0] for result in results)
    assert results[0]["error"].startswith("1 of ")
    assert f"sequence {results[0]['first']['sequence']}, position" in results[0]["error"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "ranks", "name"),
    [
        ("fsdp2", 3, "untied"),
        ("tensor_parallel4", 4, "tied"),
        ("fsdp1", 2, "mixture"),
        ("experts1", 4, "mixture"),
        ("tensor_parallel2", 2, "mixture"),
        ("shared_fsdp1", 2, "mixture"),
        ("shared_tensor_parallel2", 2, "untied"),
    ],
)
def test_gradients_are_those_of_one_rank(
    kind: str, ranks: int, name: str, processes: Processes, tmp_path: Path
) -> None:
    write_model(tmp_path, name)
    run(processes, ranks, [kind, tmp_path, 0])


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["fsdp2", "tensor_parallel2"])
def test_a_mixture_has_the_bits_of_one_rank(
    kind: str, processes: Processes, tmp_path: Path
) -> None:
    """The worker compares each token with the whole model's."""
    write_model(tmp_path, "mixture")
    first, other = run(processes, 2, [kind, tmp_path, 2])
    assert first == other
    assert first["1"] != first["2"]


@given(st.lists(st.lists(st.floats(-1e4, 1e4, width=16), min_size=3, max_size=3), min_size=1))
def test_parts_are_added_in_float32_in_their_order(rows: list[list[float]]) -> None:
    parts = [torch.tensor(row, dtype=torch.bfloat16) for row in rows]
    expected = [0.0, 0.0, 0.0]
    for part in parts:
        expected = (torch.tensor(expected) + part.float()).tolist()
    assert sum_in_order(parts).tolist() == expected
