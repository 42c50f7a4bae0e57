"""Gradients for vLLM's batch-invariant operations: the functions themselves, and a patch for code that calls torch's.

patch_batch_invariant_with_gradients()
y = linear(x, weight)          # vLLM's bits forward, a fixed order of sums backward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.models.ops.invariant import add_rms_norm as fused_add_rms_norm
from example_trainer.models.ops.invariant import (
    attention,
    chosen_logprobs,
    embedding,
    linear,
    matmul,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from example_trainer.models.packing import Packing
from vllm_patching.batch_invariant.settings import enable_settings

__all__ = [
    "Packing",
    "attention",
    "chosen_logprobs",
    "embedding",
    "fused_add_rms_norm",
    "linear",
    "matmul",
    "patch_batch_invariant_with_gradients",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]


def patch_batch_invariant_with_gradients() -> list[str]:
    """Pin torch's settings for the rest of the process, and give `torch.bmm` its gradient back.

    vLLM's mode puts a plain function of its own in the place of `torch.bmm`, through which no gradient flows: training would
    go on with parameters that never change. The function stays what computes the product, also in the backward pass. Its
    other replacements lie below autograd and need nothing. Safe to call twice.

    Returns:
        what was patched.

    Raises:
        SettingsError: the GPU is in use already with other settings.
    """
    enable_settings()
    product: Any = torch.bmm
    if not hasattr(product, "__code__") or getattr(product, "has_gradient", False):
        return []  # torch's own, or done before

    class BatchedProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            result: Tensor = product(a, b)
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            return product(dy, b.transpose(1, 2)), product(a.transpose(1, 2), dy)

    def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None:
            result: Tensor = product(a, b, out=out)
            return result
        result = BatchedProduct.apply(a, b)
        return result

    bmm.has_gradient = True  # type: ignore[attr-defined]
    torch.bmm = bmm  # type: ignore[assignment]
    return ["torch.bmm"]
