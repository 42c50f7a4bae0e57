"""check_fast_table.py as tests."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which the GPU's PyTorch brings")

from tests.gpu.check_fast_table import checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CHECKS = checks()


@pytest.mark.parametrize("name", CHECKS)
def test_on_this_gpu(name: str) -> None:
    torch.manual_seed(0)
    right, seen = CHECKS[name]()
    assert right, seen
