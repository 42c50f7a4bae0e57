"""code_trips.py: an item passes through few files, and their number may only fall."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.code_trips import Surroundings, environment_trips

pytestmark = pytest.mark.nightly

MAX_FILES = {"arithmetic_item": 16, "tool_conversation": 16}


def test_an_item_passes_through_few_files(tmp_path: Path) -> None:
    with Surroundings(tmp_path) as around:
        trips = environment_trips(around)
    assert trips.keys() == MAX_FILES.keys()
    for name, trip in trips.items():
        assert len(trip.files) <= MAX_FILES[name], f"{name}: {sorted(trip.files)}"
