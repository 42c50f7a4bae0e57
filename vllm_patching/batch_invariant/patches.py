"""Our operations in the place of vLLM's in its batch-invariant mode; call before the model is
built, in the worker.

    vLLM 0.26                                          ours
    RMSNorm: fused CUDA kernel, chosen by token count  one block per row (kernels)
    linear layers, output head: Triton                 cuBLASLt without split-K
    logprobs: one block per row, or (V2) over bf16     chunks over the whole GPU
    softmax of the sampler: torch's sum, by row count  exp(log_softmax)
    all-reduce over tensor-parallel ranks              in the ranks' order, see sum_over_ranks
    router and experts: Triton, tiles by row count     sorted rows, grouped product, slots in order

RoPE, silu_and_mul and attention stay vLLM's, and the trainer calls those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.settings import nccl_variables, restore_nccl
from vllm_patching.compat.batch_invariant import (
    gather_parts,
    keep_nccl_variables,
    replace_batch_invariant,
    sum_in_one_kernel,
)
from vllm_patching.compat.experts import replace_experts


def apply_patches() -> list[str]:
    """Replace vLLM's functions in this process.

    Returns:
        what was replaced, as dotted names.

    Raises:
        UnsupportedVllm: one of them is not where the supported versions have it.
    """
    keep_nccl_variables(_with_own_nccl)
    return replace_batch_invariant(
        _rms_norm, _linear, ops.log_softmax, ops.token_logprobs, _softmax, sum_over_ranks
    )


def patch_experts() -> list[str]:
    """Replace vLLM's router and experts in a worker; see `apply_patches`."""
    return replace_experts(_linear, ops.route, ops.experts, sum_over_ranks)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Add x [..., width] of all tensor-parallel ranks in the order of the ranks; see SumPlan.

    vLLM's one-stage all-reduce does so in one kernel. GPUs that do not see each other's memory lack
    it. Their parts are gathered and then added, with the same bits, which the self-test compares.
    Nothing here waits for the GPU, so a CUDA graph can hold it.
    """
    flat = x.reshape(-1, x.shape[-1])
    if (total := sum_in_one_kernel(flat)) is not None:
        return total.view(x.shape)
    parts = gather_parts(flat)
    if len(parts) == 1:  # vLLM 0.26 sums the embedding over one rank too
        return x
    return ops.add_parts(parts).view(x.shape)


def _with_own_nccl(change: Callable[[], Any]) -> Any:
    variables = nccl_variables()
    try:
        return change()
    finally:
        restore_nccl(variables)


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if weight is None:
        raise NotImplementedError(
            "deterministic mode has no RMSNorm without a weight; this model is not supported"
        )
    if residual is None:
        return ops.rms_norm(x, weight, eps)
    return ops.fused_add_rms_norm(x, residual, weight, eps)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return ops.linear(x, weight, bias)


def _softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """Stands for aten::_softmax, whose third argument is whether to widen halves."""
    if dim not in (-1, x.dim() - 1):
        raise NotImplementedError(
            f"deterministic mode takes a softmax over the last dimension alone, not over {dim}"
        )
    flat = x.reshape(-1, x.shape[-1])
    result = ops.log_softmax(flat).exp_().view(x.shape)
    return result if dtype else result.to(x.dtype)
