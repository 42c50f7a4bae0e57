"""The checks of the programs in this folder, as tests."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import Any

import pytest
import torch

from bench.gpu.checks import outcome_of
from tests.gpu.check_killed_writer import rows
from vllm_patching.batch_invariant.settings import enable_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROGRAMS = ["single_copy_pieces", "out_of_memory", "deterministic_trainer"]
if importlib.util.find_spec("triton"):
    PROGRAMS.append("fast_table")  # the GPU's PyTorch brings Triton
CHECKS: dict[str, Any] = {
    f"{program}: {name}": check
    for program in PROGRAMS
    for name, check in dict(import_module(f"tests.gpu.check_{program}").checks()).items()
}


@pytest.mark.parametrize("name", CHECKS)
def test_on_this_gpu(name: str) -> None:
    torch.manual_seed(0)
    if name.startswith("deterministic_trainer"):
        enable_settings()
    outcome = outcome_of(CHECKS[name])
    assert outcome["passed"], outcome["seen"]


def test_a_killed_writer_delays_no_reader() -> None:
    bad = [row for row in rows() if not row.good]
    assert not bad
