"""200 means durable: a service that is killed under load loses no group and doubles none.

test_faults.py does it twenty times.
"""

from __future__ import annotations

from pathlib import Path

from .killed_service import survive_kills


def test_three_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    survive_kills(tmp_path, kills=3)
