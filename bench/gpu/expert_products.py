"""Time a mixture's products for a few tokens beside PyTorch's grouped product, by their blocks; and
whole layers of experts beside vLLM's.

    python bench/gpu/expert_products.py --output DIR                        one Hopper GPU, at most four minutes
    python bench/gpu/expert_products.py --output DIR --tiny --device cpu    that the script runs, under Triton's interpreter

The sizes are of Qwen3-30B-A3B, with each token's eight experts drawn at random. For each candidate:
milliseconds, TFLOP/s, GB/s of matrices that some row needs, and the relative error against the
first row. Also whether a second run gave the same bits, and whether the bits equal the grouped
product's, which deterministic mode needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

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
from bench.measured import command_line
from vllm_patching.batch_invariant import ops, reference

EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
TOKENS = (32, 256, 1, 8, 128, 512, 1024)
TINY_TOKENS = (3, 9)


def blocks() -> list[Any]:
    """Return the blocks of a product, first the ones that are taken."""
    from vllm_patching.batch_invariant.expert_kernels import (
        MIDDLE,
        NARROW,
        WIDE,
        ProductBlocks,
    )

    return [
        NARROW,
        MIDDLE,
        WIDE,
        ProductBlocks(16, 64, 128),
        ProductBlocks(32, 64, 128),
        ProductBlocks(16, 128, 128, stages=3),
        ProductBlocks(32, 128, 128, stages=3),
        ProductBlocks(16, 128, 64, warps=8, stages=5),
        ProductBlocks(16, 64, 256, stages=3),
    ]


class ExpertProducts(KernelCandidates):
    """The comparisons of one run and their figures."""

    calls = 10

    def comparisons(self) -> dict[str, Callable[[], Comparison]]:
        """See KernelCandidates."""
        self.experts, self.chosen = (8, 2) if self.args.tiny else (EXPERTS, CHOSEN)
        self.hidden, self.inner = (32, 16) if self.args.tiny else (HIDDEN, INNER)
        self.w13 = self.normal(self.experts, 2 * self.inner, self.hidden) * 0.05
        self.w2 = self.normal(self.experts, self.hidden, self.inner) * 0.05
        found: dict[str, Callable[[], Comparison]] = {}
        for tokens in TINY_TOKENS if self.args.tiny else TOKENS:
            found[f"gate and up, {tokens} tokens"] = partial(self.product, tokens, self.w13, True)
            found[f"down, {tokens} tokens"] = partial(self.product, tokens, self.w2, False)
            found[f"layer, {tokens} tokens"] = partial(self.layer, tokens)
        return found

    def routed(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Draw the experts of each token, and their weights."""
        logits = self.normal(tokens, self.experts)
        weights, chosen = reference.route(logits, self.chosen, True)
        return weights.float(), chosen

    def product(self, tokens: int, weight: Tensor, takes: bool) -> Comparison:
        """The product of the experts' rows with one of their matrices."""
        from vllm_patching.batch_invariant.expert_kernels import few_rows

        assigned = ops.Assigned(*reference.assign(self.routed(tokens)[1].cpu(), self.experts))
        assigned = ops.Assigned(*(part.to(self.device) for part in assigned))
        count = tokens if takes else len(assigned.tokens)
        x, numbers = self.normal(count, weight.shape[2]), assigned.tokens if takes else None

        def library() -> tuple[Tensor]:
            rows = x if numbers is None else x.index_select(0, numbers)
            return (ops.grouped_product(rows, weight, assigned.ends),)

        def ours(one: Any) -> tuple[Tensor]:
            return (few_rows(x, weight, assigned.ends, numbers, one),)

        needed = len(assigned.ends.diff(prepend=assigned.ends.new_zeros(1)).nonzero())
        candidates = [Candidate("grouped product", library)]
        candidates += [Candidate(str(one), partial(ours, one)) for one in blocks()]
        flops = 2.0 * len(assigned.tokens) * weight[0].numel()
        return Comparison(flops, candidates, needed * weight[0].numel() * weight.itemsize)

    def layer(self, tokens: int) -> Comparison:
        """All experts of a layer, from the router's choice on."""
        (weights, chosen), x = self.routed(tokens), self.normal(tokens, self.hidden)

        def ours() -> tuple[Tensor]:
            return (ops.experts(x, weights, chosen, self.w13, self.w2),)

        candidates = [Candidate("ours", ours)]
        if self.on_gpu:
            module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
            numbers = chosen.int()

            def theirs() -> tuple[Tensor]:
                return (module.fused_experts(x, self.w13, self.w2, weights, numbers),)

            candidates.append(Candidate("vLLM", theirs, ours=False, fixed=False))
        flops = 6.0 * tokens * self.chosen * self.hidden * self.inner
        return Comparison(flops, candidates)


def main(arguments: list[str] | None = None) -> int:
    options = common_options("expert_products") | OPTIONS
    args: argparse.Namespace = command_line(__doc__, options).parse_args(arguments)
    prepare(args.device)
    return run_and_report(args, ExpertProducts, report)


if __name__ == "__main__":
    raise SystemExit(main())
