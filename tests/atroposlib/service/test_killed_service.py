"""Kills of the service: no group is lost under load, and the load program itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.atroposlib.service.check_kills import FAULTS, Ledger, group_of, main

from .killed_service import survive_kills


def test_three_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    survive_kills(tmp_path, kills=3)


@pytest.mark.usefixtures("forked_children")
def test_a_short_load_with_a_kill_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    assert main(["--clients", "8", "--minutes", "0.03", "--kills", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["groups"] == 16 * found["batches"] > 0
    assert [found[name] for name in FAULTS] == [0, 0, 0, 0]
    assert found["requests without an answer"] > 0, "the kill did hit requests"
    assert len(found["restart_seconds"]) == 1


def test_every_fault_is_counted() -> None:
    ledger = Ledger()
    ledger.accepted.update([1, 2, 3, 4])
    changed = group_of(4)
    changed["inference_logprobs"][2][5] -= 1e-12
    ledger.train([group_of(1), group_of(2)])
    ledger.train([group_of(2), group_of(5), changed])
    counted = {
        "groups": 4,
        "batches": 2,
        "lost": 1,
        "doubled": 1,
        "never accepted": 1,
        "changed": 1,
    }
    assert ledger.verdict() == counted
