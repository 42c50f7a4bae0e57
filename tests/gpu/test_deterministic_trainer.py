"""check_deterministic_trainer.py as tests."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.check_deterministic_trainer import checks
from vllm_patching.batch_invariant.settings import enable_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("name", checks())
def test_on_this_gpu(name: str) -> None:
    enable_settings()
    good, seen = checks()[name]()
    assert good, seen
