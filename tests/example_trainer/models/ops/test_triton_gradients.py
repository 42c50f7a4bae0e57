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
def near(mine, theirs):
    return (mine.double() - theirs.double()).norm() < 1e-3 * theirs.double().norm()
"""
WEIGHTS = """
Blocks, described = triton_gradients.WeightBlocks, triton_gradients.DESCRIPTOR_BLOCKS
for lengths in ((1, 63, 64, 65, 130), (256,), (300, 5)):
    packing, tokens = Packing(lengths), sum(lengths)
    for outputs, inputs in ((256, 256), (200, 136)):
        dy, x = whole(tokens, outputs), whole(tokens, inputs)
        exact = torch.ones(outputs, inputs)
        torch_gradients.add_weight_gradient(dy, x, exact, packing)
        for blocks in (
            None, triton_gradients.WIDE_BLOCKS, described, Blocks(256, 128, ahead=True), Blocks(64, 64)
        ):
            total = torch.ones(outputs, inputs)
            triton_gradients.add_weight_gradient(dy, x, total, packing, blocks)
            assert torch.equal(total, exact), (lengths, outputs, inputs, blocks)
print("ALL AGREE")
"""
DESCRIPTORS = """
# Bits of sums that round, with rows further apart than they are wide. Rows of NaN stand before and
# behind the packed rows and make up a span: in both kernels none of them may reach another span.
wide, described = triton_gradients.WIDE_BLOCKS, triton_gradients.DESCRIPTOR_BLOCKS
def gradient(dy, x, packing, blocks):
    total = torch.linspace(-1, 1, 256 * 256).view(256, 256)
    triton_gradients.add_weight_gradient(dy, x, total, packing, blocks)
    return total
for lengths in ((1, 63, 64, 65, 130), (3,), (300, 5)):
    tokens = sum(lengths)
    dy, x = (normal(tokens + 128, 512)[:, :256] for _ in range(2))
    for rows in (dy, x):
        rows[:64], rows[64 + tokens:] = torch.nan, torch.nan
    dy, x = dy[64:64 + tokens], x[64:64 + tokens]
    packing = Packing(lengths)
    exact = gradient(dy, x, packing, wide)
    assert exact.isfinite().all()
    assert torch.equal(gradient(dy, x, packing, described), exact), lengths
    # The NaN of the second span may only reach what the second span's tiles are added to.
    if len(lengths) > 1:
        dy[lengths[0]:], x[lengths[0]:] = torch.nan, torch.nan
        first = Packing(lengths[:1])
        exact = gradient(dy, x, first, wide)
        assert exact.isfinite().all()
        assert torch.equal(gradient(dy, x, first, described), exact), lengths
print("ALL AGREE")
"""
EXPERTS = """
from dataclasses import replace
for counts in (
    [[1, 63, 64, 65], [0, 0, 0, 0], [130, 0, 1, 7]], [[0, 0], [0, 3]], [[128], [64]], [[0], [0]]
):
    rows = torch.tensor(counts)
    ends = rows.flatten().cumsum(0).view(rows.shape)
    bounds = torch.cat([(ends - rows)[:, :1], ends], 1)
    for outputs, inputs in ((256, 256), (72, 40)):
        dy, x = whole(int(rows.sum()), outputs), whole(int(rows.sum()), inputs)
        exact = torch.ones(len(rows), outputs, inputs)
        torch_gradients.add_expert_gradient(dy, x, exact, bounds)
        described = triton_gradients.DESCRIPTOR_BLOCKS
        for blocks in (None, triton_gradients.WIDE_BLOCKS, described, replace(described, tokens=32)):
            total = torch.ones(len(rows), outputs, inputs)
            triton_gradients.add_expert_gradient(dy, x, total, bounds, blocks)
            assert torch.equal(total, exact), (counts, outputs, inputs, blocks)
print("ALL AGREE")
"""
ATTENTION = """
shapes = ((1, 63, 64, 65, 130), None), ((300, 5), None), ((70, 64, 9, 30, 5), (-1, 0, 1, 0, -1))
for lengths, parents in shapes:
    packing, tokens = Packing(lengths, parents=parents), sum(lengths)
    q, upstream = normal(tokens, 4, 64), normal(tokens, 4, 64)
    k, v = normal(tokens, 2, 64), normal(tokens, 2, 64)
    shared = ops.SeenKeys(packing.key_rows, packing.cu_keys, packing.longest) if parents else None
    out, lse = ops.attention_varlen(q, k, v, packing.cu_seqlens, packing.max_length, 0.125, shared)
    given = upstream, q, k, v, out, lse, packing, 0.125
    exact = torch_gradients.attention_backward(*given)
    for mine, theirs in zip(triton_attention.attention_backward(*given), exact):
        assert near(mine, theirs), lengths
print("ALL AGREE")
"""
NORMS = """
for lengths in ((1, 63, 64, 65, 130), (300, 5)):
    packing, tokens = Packing(lengths), sum(lengths)
    for per_token, width in ((1, 200), (3, 48)):
        dy, x, extra = (normal(tokens * per_token, width) for _ in range(3))
        given = dy, x, normal(width), 1e-6, extra, packing
        (mine, shares), (theirs, exact_shares) = (
            passes.norm_gradient(*given) for passes in (triton_gradients, torch_gradients)
        )
        total, exact = torch.ones(width), torch.ones(width)
        triton_gradients.add_shares(shares, total)
        torch_gradients.add_shares(exact_shares, exact)
        assert near(mine, theirs) and near(total, exact), (lengths, per_token)
    rows, total, exact = whole(tokens, 200), torch.ones(200), torch.ones(200)
    triton_gradients.add_row_sums(rows, total, packing)
    torch_gradients.add_row_sums(rows, exact, packing)
    assert torch.equal(total, exact), lengths
print("ALL AGREE")
"""
HEADS = """
for lengths in ((1, 63, 64, 65, 130), (300, 5)):
    packing, tokens = Packing(lengths), sum(lengths)
    for width, turned, interleaved, normed in (
        (32, 32, False, True), (24, 24, False, False), (32, 16, True, True), (32, 16, False, True)
    ):
        angles = torch.randn(max(lengths), turned // 2, generator=generator)
        table = torch.cat((angles.cos(), angles.sin()), -1).half()
        upstream = [normal(tokens, count, width) for count in (4, 2, 2)]
        norms = (normal(width), normal(width)) if normed else None
        given = *upstream, normal(tokens, 8 * width), norms, 1e-6, packing, table, interleaved
        (mine, shares), (theirs, exact_shares) = (
            passes.heads_gradient(*given) for passes in (triton_gradients, torch_gradients)
        )
        assert near(mine, theirs), (lengths, width, turned, interleaved)
        for part, exact_part in zip(shares if normed else (), exact_shares if normed else ()):
            total, exact = torch.ones(width), torch.ones(width)
            triton_gradients.add_shares(part, total)
            torch_gradients.add_shares(exact_part, exact)
            assert near(total, exact), (lengths, width, turned, interleaved)
print("ALL AGREE")
"""
PAGES = """
from vllm_patching.batch_invariant import kernels
from vllm_patching.batch_invariant.pages import make_page_plan
packing = Packing((1, 16, 37, 5))
plan = make_page_plan(packing.cu_seqlens, packing.tokens, packing.max_length)
wide = normal(packing.tokens, 6, 24)
k, v = wide[:, :3], wide[:, 3:]
keys, values = plan.lay_out(k, v)
cache = torch.zeros(plan.pages, 3, 16, 48, dtype=k.dtype)
kernels.lay_out(k, v, cache, plan.page, plan.offset)
laid = cache.transpose(1, 2).split(24, dim=-1)
assert torch.equal(laid[0], keys) and torch.equal(laid[1], values)
print("ALL AGREE")
"""
ROWS = """
# Rows of heads share a program. Each must be as if alone, and none behind the last may be written.
from vllm_patching.batch_invariant import kernels, reference
for width in (64, 80, 256, 512):
    weight = normal(width)
    for tokens in (1, 5, 6, 16, 43):
        wide = normal(tokens, 5, width)
        heads = wide[:, 1:4]
        normed = kernels.rms_norm(heads, weight, 1e-6)
        assert near(normed, reference.rms_norm(heads, weight, 1e-6))
        rows = heads.reshape(-1, width)
        for row in (0, len(rows) - 1):
            alone = kernels.rms_norm(rows[row:row + 1], weight, 1e-6)
            assert torch.equal(alone[0], normed.view(-1, width)[row]), (width, tokens, row)
        mine, theirs = (
            passes.fused_add_rms_norm(rows, rows.flip(0), weight, 1e-6) for passes in (kernels, reference)
        )
        assert near(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
        spare = torch.full((len(rows) + 64, width), 7.0).half()
        kernels._launch(rows, None, weight, spare[:len(rows)], None, width, 0, 1, 1e-6)
        assert torch.equal(spare[:len(rows)], normed.view(-1, width))
        assert (spare[len(rows):] == 7).all(), (width, tokens)
print("ALL AGREE")
"""
CHOICE = """
half, described = triton_gradients.HALF_BLOCKS, triton_gradients.DESCRIPTOR_BLOCKS
wide = triton_gradients.WIDE_BLOCKS
def choose(major, outputs, inputs, dtype=torch.bfloat16, first=0, spare=0):
    dy = torch.empty(2, outputs, dtype=dtype)
    x = torch.empty(2, first + inputs + spare, dtype=dtype)[:, first:first + inputs]
    return triton_gradients.weight_blocks(dy, x, major)
assert choose(9, 12288, 2048) == described
assert choose(9, 12288, 2048, spare=8) == described
assert choose(9, 12288, 2048, spare=4) == wide, "rows begin at any multiple of 8 bytes"
assert choose(9, 12288, 2048, first=4, spare=4) == wide, "the first row does not begin at 16 bytes"
assert choose(10, 12288, 2048) == wide
assert choose(9, 1024, 1024) == half, "too few programs"
assert choose(9, 12288, 896) == half, "columns are left over"
assert choose(8, 12288, 2048) == half
assert choose(9, 12288, 2048, dtype=torch.float32) == triton_gradients.FLOAT32_BLOCKS
print("ALL AGREE")
"""
PROGRAMS = {
    "weights": WEIGHTS, "descriptors": DESCRIPTORS, "experts": EXPERTS, "attention": ATTENTION,
    "norms": NORMS, "heads": HEADS, "pages": PAGES, "rows": ROWS, "choice": CHOICE,
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_kernels_agree_with_torch(tmp_path: Path, program: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", DRAWS + program]
        process = start_unguarded(command, log.fileno(), environment, ROOT)
    status, output = process.wait(300), (tmp_path / "log").read_text()
    assert (status, "ALL AGREE" in output) == (0, True), output[-2000:]
