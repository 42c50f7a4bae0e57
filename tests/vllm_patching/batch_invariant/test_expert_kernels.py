"""The experts' kernels under Triton's interpreter, so without a GPU, against the reference."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.forked_commands import start_unguarded

ROOT = Path(__file__).resolve().parents[3]
# A sum of small whole numbers has the same bits in any order. The numbers are in float16, because
# the interpreter multiplies the bits of bfloat16 as if they were whole numbers.
PROGRAM = """
import torch
from vllm_patching.batch_invariant import expert_kernels as kernels
from vllm_patching.batch_invariant import ops, reference

generator = torch.Generator().manual_seed(0)
def whole(*shape): return torch.randint(-3, 4, shape, generator=generator).half()

def compared(chosen, experts, width, depth):
    theirs = ops.Assigned(*reference.assign(chosen, experts))
    mine = ops.Assigned(*kernels.assign(chosen, experts))
    for name, one, other in zip(theirs._fields, mine, theirs, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), name
    x, weight = whole(len(chosen), depth), whole(experts, width, depth)
    rows = x.index_select(0, theirs.tokens)
    exact = reference.expert_linear(rows, weight, theirs.ends)
    for blocks in (None, kernels.MIDDLE, kernels.ProductBlocks(16, 64, 128)):
        taken = kernels.few_rows(x, weight, theirs.ends, theirs.tokens, blocks)
        assert torch.equal(taken, exact), (blocks, "taken")
        assert torch.equal(kernels.few_rows(rows, weight, theirs.ends, None, blocks), exact), blocks

draw = torch.rand(70, 6, generator=generator).argsort()
compared(draw[:, :2], 6, 128, 64)  # rows of an expert that one block cannot hold
compared(draw[:5, :3], 6, 136, 72)  # blocks that do not divide the matrix
compared(torch.full((40, 1), 3), 6, 64, 128)  # one expert has all rows
compared(draw[:1, :1], 6, 64, 64)
compared(draw.repeat(20, 1), 6, 16, 16)  # more slots than a program reads at once
print("ALL AGREE")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_agree_with_the_reference(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = start_unguarded([sys.executable, "-c", PROGRAM], log.fileno(), environment, ROOT)
    status, output = process.wait(300), (tmp_path / "log").read_text()
    assert (status, "ALL AGREE" in output) == (0, True), output[-2000:]
