"""The benchmarks of the weight bridge run, on a tiny model without a GPU; only their figures mean
nothing here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import weight_sync

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.usefixtures("forked_children")]


def test_weight_sync_measures_both_ways_of_transfer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--output",
        str(tmp_path),
        "--device",
        "cpu",
        "--tiny",
        "--parts",
        "ceiling",
        "bridge",
    ]
    assert weight_sync.main(arguments) == 0, capsys.readouterr().out
    data = json.loads((tmp_path / "weight_sync_tiny.json").read_text())
    assert data["ceiling"]["broadcast_gb_per_s"] > 0
    for transfer in ("direct", "overlapped"):
        part = data["bridge"][transfer]
        assert (
            part["connect, recompute"]["params_mapped"]
            == part["connect, recompute"]["params_total"]
        )
        assert part["check"]["checksums_equal"]
        assert part["check"]["new_not_old"]
        for condition in ("idle", "load_4"):
            assert (
                part[condition]["updates"] == part[condition]["first_byte_to_verified_ms"]["n"] == 3
            )
            assert part[condition]["bytes_moved"] == data["model_bytes"]
            assert part[condition]["halted_ms"]["median"] > 0
        assert part["load_4"]["usual_gap_ms"]["n"] > 0, "no token was seen to arrive"
        assert not part["load_4"]["request_failures"]
        # After an update that finds no request in flight, because all four have just ended, the
        # trainer does not wait for the next step.
        assert 1 <= part["load_4"]["stalled_ms"]["n"] <= 3, (
            "the server never said when its engine went on"
        )
    assert "bridge, overlapped, load_4" in capsys.readouterr().out
