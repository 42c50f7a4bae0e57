"""Gradients for vLLM's batch-invariant operations: the functions themselves, and a patch for code
that calls torch's.

init_batch_invariance()                    # vLLM's mode, whichever supported version is installed
patch_batch_invariant_with_gradients()
y = linear(x, weight)                      # vLLM's bits forward, a fixed order of sums backward

The names `enable_batch_invariant_backward_mode`, `rms_norm_with_gradients`,
`silu_and_mul_with_gradients` and `VLLMRMSNorm` are those under which scripts for TorchTitan's
deterministic_vllm_rl experiment import the same things.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from example_trainer.models.attention import FlashAttnWithBackward
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
from vllm_patching.batch_invariant.process import enter_mode
from vllm_patching.batch_invariant.settings import enable_settings

__all__ = [
    "FlashAttnWithBackward",
    "Packing",
    "VLLMRMSNorm",
    "attention",
    "chosen_logprobs",
    "embedding",
    "enable_batch_invariant_backward_mode",
    "fused_add_rms_norm",
    "init_batch_invariance",
    "linear",
    "matmul",
    "patch_batch_invariant_with_gradients",
    "rms_norm",
    "rms_norm_with_gradients",
    "rotary_embedding",
    "silu_and_mul",
    "silu_and_mul_with_gradients",
]

logger = logging.getLogger(__name__)


def init_batch_invariance() -> list[str]:
    """Switch vLLM's batch-invariant mode on in this process and its child processes, with this
    project's operations.

    Call it before anything uses the GPU, and before vLLM is imported. It works with every supported
    vLLM, wherever that version keeps its own function of this name and whatever arguments that
    takes. Without an NVIDIA GPU vLLM has no such mode. Only the settings are pinned, the operations
    run their reference in torch, and the log has a warning. Safe to call twice.

    Returns:
        The functions of vLLM that were replaced, as dotted names; an empty list without a GPU.

    Raises:
        SettingsError: the GPU is in use already with other settings, or vLLM was imported with the
            mode switched off.
        UnsupportedVllm: vLLM is missing, or has no such mode where the supported versions have it.
    """
    if not torch.cuda.is_available():
        enable_settings()
        logger.warning(
            "init_batch_invariance: no NVIDIA GPU here, where vLLM has no batch-invariant kernels; the operations run their "
            "reference in torch, whose bits are not vLLM's"
        )
        return []
    return enter_mode()


def rms_norm_with_gradients(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [..., dim] of any number of dimensions.
        weight: [dim], in the dtype of x.
        eps: added under the root.

    Returns:
        The shape and dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rms_norm(rows, weight, eps).view(x.shape) if len(rows) else x * weight


class VLLMRMSNorm(nn.Module):
    """RMSNorm in the bits of vLLM's, with gradients.

    Args:
        hidden_size: width of the last dimension.
        eps: added under the root.
        dtype, device: of the weight; not given: torch's defaults.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of [..., hidden_size], in its dtype."""
        return rms_norm_with_gradients(x, self.weight, self.eps)

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)


def patch_batch_invariant_with_gradients() -> list[str]:
    """Pin torch's settings for the rest of the process, and give `torch.bmm` its gradient back.

    vLLM's mode puts a plain function of its own in the place of `torch.bmm`, through which no
    gradient flows. Training would go on with parameters that never change. The function stays what
    computes the product, also in the backward pass. Its other replacements lie below autograd and
    need nothing. Safe to call twice.

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


enable_batch_invariant_backward_mode = patch_batch_invariant_with_gradients
silu_and_mul_with_gradients = silu_and_mul
