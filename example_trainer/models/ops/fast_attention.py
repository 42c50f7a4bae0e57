"""Attention from a library: FlashAttention 4 if it is installed and knows the GPU, else PyTorch's FlashAttention 2."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from example_trainer.models.packing import Packing

logger = logging.getLogger(__name__)

_Attention = Callable[[Tensor, Tensor, Tensor, Packing, float], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention of packed spans; k and v are those of what each span sees (`packing.key_rows`).

    A span's queries are the last of its keys' positions: both libraries align the causal mask there.

    Args:
        q: [tokens, heads, head_dim]; k, v: [keys, kv_heads, head_dim].
        scale: of the scores.

    Returns:
        [tokens, heads, head_dim].
    """
    return _chosen(q.device.index or 0)(q, k, v, packing, scale)


@functools.cache
def _chosen(device: int) -> _Attention:
    if torch.cuda.get_device_capability(device) >= (9, 0):
        try:
            from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]
        except ImportError as error:
            logger.info(
                "FlashAttention 4 is not there (%s): attention runs on PyTorch's FlashAttention 2, which takes longer for long "
                "sequences; pip install flash-attn-4",
                error,
            )
        else:
            return functools.partial(_flash_attention_4, flash_attn_varlen_func)
    return _torch_attention


def _flash_attention_4(function: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    out = function(
        q,
        k,
        v,
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_k=packing.cu_keys,
        max_seqlen_q=packing.max_length,
        max_seqlen_k=packing.longest,
        softmax_scale=scale,
        causal=True,
    )
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


@functools.cache
def _causal() -> dict[str, Any]:
    """How this PyTorch's varlen_attn is asked for a causal mask and for shared key heads, which differs by version."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return options | ({"enable_gqa": True} if "enable_gqa" in known else {})


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in _causal() and q.shape[1] != k.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    result: Any = varlen_attn(
        q, k, v, packing.cu_seqlens, packing.cu_keys, packing.max_length, packing.longest, scale=scale, **_causal()
    )
    return result
