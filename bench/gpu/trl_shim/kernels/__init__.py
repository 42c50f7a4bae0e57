"""Stands in for the package `kernels`, which fetches FlashAttention 3 from a hub: the library that
our trainer uses here.

That is FlashAttention 4 as vLLM brings it, where it can be imported; else PyTorch's variable-length
attention.
"""

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

try:
    from vllm.vllm_flash_attn.cute import flash_attn_varlen_func as flash_attention_4
except ImportError:
    flash_attention_4 = None
_NAMES = set(inspect.signature(varlen_attn).parameters)


class _Kernel:
    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
        softmax_scale: float | None = None, causal: bool = True, window_size: tuple[int, int] = (-1, -1), **_: Any,
    ) -> Any:  # fmt: skip
        if flash_attention_4 is not None and window_size == (-1, -1):
            return flash_attention_4(
                q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=int(longest_q), max_seqlen_k=int(longest_k),
                softmax_scale=softmax_scale, causal=causal,
            )  # fmt: skip
        options: dict[str, Any] = {"is_causal": causal} if "is_causal" in _NAMES else {}
        if "window_size" in _NAMES:
            options["window_size"] = (
                (-1, 0) if causal and "is_causal" not in _NAMES else window_size
            )
        if "scale" in _NAMES:
            options["scale"] = softmax_scale
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and "enable_gqa" in _NAMES:
            options["enable_gqa"] = True
        elif groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return varlen_attn(q, k, v, cu_q, cu_k, int(longest_q), int(longest_k), **options)


def get_kernel(*_: Any, **__: Any) -> type[_Kernel]:
    """Accept any request."""
    return _Kernel
