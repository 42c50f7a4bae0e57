"""The Triton kernels of backward passes under Triton's interpreter, so without a GPU, against torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.forked_commands import start_unguarded

ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
# In float16: the interpreter multiplies the bits of bfloat16 as if they were whole numbers.
DRAWS = """
import torch
from example_trainer.models.ops import torch_gradients, triton_attention, triton_gradients
from example_trainer.models.packing import Packing
from vllm_patching.batch_invariant import ops
generator = torch.Generator().manual_seed(0)
def whole(*shape): return torch.randint(-4, 5, shape, generator=generator).half()
def normal(*shape): return torch.randn(*shape, generator=generator).half()
"""
WEIGHTS = """
Blocks = triton_gradients.WeightBlocks
for lengths in ((1, 63, 64, 65, 130), (256,), (300, 5)):
    packing, tokens = Packing(lengths), sum(lengths)
    for outputs, inputs in ((256, 256), (200, 136)):
        dy, x = whole(tokens, outputs), whole(tokens, inputs)
        exact = torch.ones(outputs, inputs)
        torch_gradients.add_weight_gradient(dy, x, exact, packing)
        for blocks in (None, triton_gradients.WIDE_BLOCKS, Blocks(256, 128, ahead=True), Blocks(64, 64)):
            total = torch.ones(outputs, inputs)
            triton_gradients.add_weight_gradient(dy, x, total, packing, blocks)
            assert torch.equal(total, exact), (lengths, outputs, inputs, blocks)
print("ALL AGREE")
"""
ATTENTION = """
Blocks = triton_attention.AttentionBlocks
pairs = (None, (Blocks(128, 64), Blocks(64, 128)), (Blocks(64, 128), Blocks(32, 128)))
shapes = ((1, 63, 64, 65, 130), None), ((300, 5), None), ((70, 64, 9, 30, 5), (-1, 0, 1, 0, -1))
for lengths, parents in shapes:
    packing, tokens = Packing(lengths, parents=parents), sum(lengths)
    q, upstream = normal(tokens, 4, 64), normal(tokens, 4, 64)
    k, v = normal(tokens, 2, 64), normal(tokens, 2, 64)
    shared = ops.SeenKeys(packing.key_rows, packing.cu_keys, packing.longest) if parents else None
    out, lse = ops.attention_varlen(q, k, v, packing.cu_seqlens, packing.max_length, 0.125, shared)
    given = upstream, q, k, v, out, lse, packing, 0.125
    exact = torch_gradients.attention_backward(*given)
    for blocks in pairs:
        ours = triton_attention.attention_backward(*given, blocks)
        for mine, theirs in zip(ours, exact):
            error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
            assert error < 1e-3, (lengths, blocks, error)
print("ALL AGREE")
"""
CHOICE = """
choose, half = triton_gradients.weight_blocks, torch.bfloat16
assert choose(half, 9, 12288, 2048) == triton_gradients.HALF_BLOCKS, "switched off"
triton_gradients.LARGE_BLOCKS = True
assert choose(half, 9, 12288, 2048) == triton_gradients.WIDE_BLOCKS
assert choose(half, 9, 1024, 1024) == triton_gradients.HOPPER_BLOCKS, "too few programs"
assert choose(half, 9, 12288, 896) == triton_gradients.HOPPER_BLOCKS, "columns are left over"
assert choose(half, 8, 12288, 2048) == triton_gradients.HALF_BLOCKS
assert choose(torch.float32, 9, 12288, 2048) == triton_gradients.FLOAT32_BLOCKS
print("ALL AGREE")
"""


@pytest.mark.parametrize(
    "program", [WEIGHTS, ATTENTION, CHOICE], ids=["weights", "attention", "choice"]
)
def test_blocks_of_every_size_agree_with_torch(tmp_path: Path, program: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", DRAWS + program]
        process = start_unguarded(command, log.fileno(), environment, ROOT)
    status, output = process.wait(300), (tmp_path / "log").read_text()
    assert (status, "ALL AGREE" in output) == (0, True), output[-2000:]
