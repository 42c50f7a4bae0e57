"""Time the blocks that the gradient kernels of the exact pass may be cut into, beside the libraries.

    python bench/gpu/gradient_kernels.py --output DIR                        one Hopper GPU, at most four minutes
    python bench/gpu/gradient_kernels.py --output DIR --tiny --device cpu    that the script runs, under Triton's interpreter

Weight gradients of each matrix of Qwen3-1.7B and 8B beside cuBLAS, with sequences of 512 tokens and
of ragged lengths. The same of the experts of a layer of Qwen3-30B-A3B. Attention's backward pass at
512, 4k and 32k tokens stands beside FlashAttention
4. For each candidate: milliseconds, TFLOP/s and the relative error against the first row. Also
whether a second run gave the same bits (if not, the case has failed), and whether the bits equal
our first candidate's.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bench.gpu.kernel_candidates import (
    OPTIONS,
    Candidate,
    Comparison,
    KernelCandidates,
    prepare,
    report,
)
from bench.gpu.runs import common_options, run_and_report
from bench.gpu.synthetic import geometry_of
from bench.measured import command_line
from example_trainer.models.ops import flash_attention_4, torch_gradients
from example_trainer.models.packing import Packing
from example_trainer.models.shards import add_product
from vllm_patching.batch_invariant import ops

SHAPES = ("qwen3-1.7b", "qwen3-8b")
MIXTURE = "qwen3-30b-a3b"
TOKENS, HEAD_TOKENS = 16384, 4096
"""Tokens of a bin, and of a chunk of logits."""
LENGTHS = {"512": (512, 16384), "4k": (4096, 16384), "32k": (32768, 32768)}


def weight_candidates(dy: Tensor, x: Tensor, experts: bool = False) -> list[Any]:
    """Return the blocks of a weight's gradient, first the blocks that any GPU takes. An expert's
    spans have few tokens: tiles of half as many are tried too.
    """
    from example_trainer.models.ops.triton_gradients import (
        DESCRIPTOR_BLOCKS,
        HALF_BLOCKS,
        WIDE_BLOCKS,
        describable,
    )

    described = [
        DESCRIPTOR_BLOCKS,
        replace(DESCRIPTOR_BLOCKS, stages=3),
        replace(DESCRIPTOR_BLOCKS, group=8),
        replace(DESCRIPTOR_BLOCKS, outputs=256, inputs=128),
        replace(DESCRIPTOR_BLOCKS, outputs=128, inputs=128, warps=4, stages=3),
        replace(DESCRIPTOR_BLOCKS, outputs=128, inputs=128, stages=3),
    ]
    if experts:
        described = described[::4]
        described += [replace(one, tokens=32, stages=2 * one.stages) for one in described]
    usable = describable(dy) and describable(x)
    return [HALF_BLOCKS, *(described if usable else []), WIDE_BLOCKS]


def ragged(tokens: int) -> list[int]:
    """Lengths up to an eighth of the tokens, which they add up to."""
    draw, lengths = random.Random(0), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, draw.randint(1, max(1, tokens // 8))))
    return lengths


class GradientKernels(KernelCandidates):
    """The comparisons of one run and their figures."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack)
        self.shapes = SHAPES[:1] if args.tiny else SHAPES

    def comparisons(self) -> dict[str, Callable[[], Comparison]]:
        """See KernelCandidates."""
        return {**self.weights(), **self.experts(), **self.attentions()}

    def weights(self) -> dict[str, Callable[[], Comparison]]:
        """The comparisons of weight gradients, by name."""
        found: dict[str, Callable[[], Comparison]] = {}
        for shape in self.shapes:
            for layout in ("512", "ragged") if shape == SHAPES[0] else ("512",):
                for name, outputs, inputs, tokens in matrices(shape):
                    tokens //= self.smaller
                    small = outputs // self.smaller, inputs // self.smaller
                    lengths = ragged(tokens)
                    if layout == "512":
                        lengths = [min(512, tokens)] * max(1, tokens // 512)
                    found[f"{name}, {shape}, {layout}"] = partial(self.weight, *small, lengths)
        return found

    def weight(self, outputs: int, inputs: int, lengths: list[int]) -> Comparison:
        """The gradient of one matrix."""
        from example_trainer.models.ops.triton_gradients import add_weight_gradient

        packing = Packing(lengths, self.device)
        dy, x = self.normal(packing.tokens, outputs), self.normal(packing.tokens, inputs)
        total = torch.zeros(outputs, inputs, device=self.device)

        def library() -> tuple[Tensor]:
            add_product(total.zero_(), dy, x)
            return (total,)

        def ours(blocks: Any) -> tuple[Tensor]:
            add_weight_gradient(dy, x, total.zero_(), packing, blocks)
            return (total,)

        name = "cuBLAS" if self.on_gpu else "torch"
        candidates = [Candidate(name, library, ours=False, fixed=False)]
        candidates += [Candidate(str(one), partial(ours, one)) for one in weight_candidates(dy, x)]
        return Comparison(2.0 * packing.tokens * outputs * inputs, candidates)

    def experts(self) -> dict[str, Callable[[], Comparison]]:
        """The comparisons of the gradients of a layer's experts, by name."""
        g = geometry_of(MIXTURE)
        hidden, inner = g.hidden_size, g.moe_intermediate_size
        sizes = {"experts' gate_up": (2 * inner, hidden), "experts' down": (hidden, inner)}
        return {
            f"{name}, {MIXTURE}, {layout}": partial(self.mixed, *sizes[name], LENGTHS[layout][0])
            for name in sizes
            for layout in ("512", "4k")
        }

    def mixed(self, outputs: int, inputs: int, length: int) -> Comparison:
        """The gradients of a layer's experts; each token chooses some by chance."""
        from example_trainer.models.ops.triton_gradients import add_expert_gradient

        g = geometry_of(MIXTURE)
        experts, chosen = g.num_experts, g.experts_per_token
        tokens, length = TOKENS // self.smaller, max(8, length // self.smaller)
        if self.args.tiny:
            experts, chosen, outputs, inputs = 4, 2, 24, 16
        scores = torch.rand(tokens, experts, generator=self.generator, device=self.device)
        choices = scores.topk(chosen, dim=1).indices.view(tokens // length, -1)
        counts = torch.stack([torch.bincount(span, minlength=experts) for span in choices], 1)
        ends = counts.flatten().cumsum(0).view_as(counts)
        bounds = torch.cat([ends[:, :1] - counts[:, :1], ends], 1)
        dy, x = self.normal(tokens * chosen, outputs), self.normal(tokens * chosen, inputs)
        total = torch.zeros(experts, outputs, inputs, device=self.device)
        rows = list(pairwise([0, *ends[:, -1].tolist()]))

        def library() -> tuple[Tensor]:
            for one, (first, end) in zip(total.zero_(), rows, strict=True):
                add_product(one, dy[first:end], x[first:end])
            return (total,)

        def ours(blocks: Any) -> tuple[Tensor]:
            add_expert_gradient(dy, x, total.zero_(), bounds, blocks)
            return (total,)

        candidates = [Candidate("one after the other", library, ours=False, fixed=False)]
        candidates += [
            Candidate(str(one), partial(ours, one)) for one in weight_candidates(dy, x, True)
        ]
        return Comparison(2.0 * tokens * chosen * outputs * inputs, candidates)

    def attentions(self) -> dict[str, Callable[[], Comparison]]:
        """The comparisons of attention's backward pass, by name, the longest sequences first."""
        found: dict[str, Callable[[], Comparison]] = {}
        for shape in self.shapes:
            for name in reversed(LENGTHS):
                if (shape, name) == (SHAPES[1], "512"):
                    continue
                length, tokens = (max(8, size // self.smaller) for size in LENGTHS[name])
                heads = geometry_of(shape)
                made = partial(self.attention, heads, [length] * (tokens // length))
                found[f"attention, {shape}, {name}"] = made
        return found

    def attention(self, geometry: Any, lengths: list[int]) -> Comparison:
        """The backward pass of one bin."""
        from example_trainer.models.ops.triton_attention import attention_backward

        heads, kv_heads, width = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        if self.args.tiny:
            heads, kv_heads = 4, 2
        packing, scale = Packing(lengths, self.device), width**-0.5
        upstream, q = (self.normal(packing.tokens, heads, width) for _ in range(2))
        k, v = (self.normal(packing.tokens, kv_heads, width) for _ in range(2))
        longest = packing.max_length
        out, lse = ops.attention_varlen(q, k, v, packing.cu_seqlens, longest, scale)
        given = upstream, q, k, v, out, lse, packing, scale
        candidates = []
        if not self.on_gpu:
            run = partial(torch_gradients.attention_backward, *given)
            candidates.append(Candidate("torch", run, ours=False))
        candidates.append(Candidate("ours", partial(attention_backward, *given)))
        if not flash_attention_4.refusal(q):
            for name, fixed in {"deterministic": True, "atomic": False}.items():
                run = partial(flash_attention_4.attention_backward, *given, deterministic=fixed)
                candidates.append(Candidate(f"FlashAttention 4, {name}", run, False, fixed))
        # Five products for each pair of a query and a key that it sees.
        return Comparison(10.0 * packing.attended_pairs * heads * width, candidates)


def matrices(shape: str) -> Iterator[tuple[str, int, int, int]]:
    """Name, outputs, inputs and tokens of each matrix of a model."""
    g = geometry_of(shape)
    queries, keys = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    yield "qkv", queries + 2 * keys, g.hidden_size, TOKENS
    yield "o", g.hidden_size, queries, TOKENS
    yield "gate_up", 2 * g.intermediate_size, g.hidden_size, TOKENS
    yield "down", g.hidden_size, g.intermediate_size, TOKENS
    yield "head", g.vocab_size, g.hidden_size, HEAD_TOKENS


def main(arguments: list[str] | None = None) -> int:
    options = common_options("gradient_kernels") | OPTIONS
    args: argparse.Namespace = command_line(__doc__, options).parse_args(arguments)
    prepare(args.device)
    return run_and_report(args, GradientKernels, report)


if __name__ == "__main__":
    raise SystemExit(main())
