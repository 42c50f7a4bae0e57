"""check_killed_writer.py as a test."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.check_killed_writer import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_a_killed_writer_holds_nobody_up() -> None:
    bad = [row for row in rows() if not row.good]
    assert not bad
