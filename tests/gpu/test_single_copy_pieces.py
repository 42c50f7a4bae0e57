"""check_single_copy_pieces.py as tests."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.check_single_copy_pieces import checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("name", checks())
def test_on_this_gpu(name: str) -> None:
    good, seen = checks()[name]()
    assert good, seen
