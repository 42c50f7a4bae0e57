"""Attention from a library: FlashAttention 4, which vLLM brings with it, where the GPU has it; else
PyTorch's FlashAttention 2.

The other is the slower one, the more so the longer the sequences (whole models:
bench/trainer_speed.py). It runs sliding windows and heads wider than 128 on every GPU:
FlashAttention 4 has no backward pass for them on Hopper.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.packing import Packing

logger = logging.getLogger(__name__)

_Attention = Callable[[Tensor, Tensor, Tensor, Packing, float, int | None], Tensor]
_FLASH_ATTENTION_4 = (9, 0)
"""Compute capability from which on FlashAttention 4 has kernels for both directions."""
_WIDEST_HEAD = 128
"""Limit of FlashAttention 4's backward pass."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of packed spans; k and v are of the tokens that each span sees
    (`packing.key_rows`).

    A span's queries are the last of its keys' positions: both libraries align the causal mask
    there.

    Args:
        q: [tokens, heads, head_dim]; k, v: [keys, kv_heads, head_dim]; tokens may be strided.
        scale: of the scores.
        window: see Operations.attention.

    Returns:
        [tokens, heads, head_dim].

    Raises:
        ModelError: there is a window, and this PyTorch has none.
    """
    if window is not None or q.shape[2] > _WIDEST_HEAD:
        return _flash_attention_2(q, k, v, packing, scale, window)
    return _library(q.device)(q, k, v, packing, scale, None)


def library_name(device: torch.device) -> str:
    """The library that this GPU uses, for the record of a measurement."""
    return f"FlashAttention {2 if _library(device) is _flash_attention_2 else 4}"


@functools.cache
def _library(device: torch.device) -> _Attention:
    capability = torch.cuda.get_device_capability(device)
    level, reason = (
        logging.INFO,
        f"it has no kernels for a GPU of compute capability {capability[0]}.{capability[1]}",
    )
    if capability >= _FLASH_ATTENTION_4:
        try:
            from vllm.vllm_flash_attn.cute import flash_attn_varlen_func
        except ImportError as error:
            level, reason = (
                logging.WARNING,
                f"it cannot be imported from vLLM ({error}); install requirements-gpu.txt",
            )
        else:
            # Its compiler warns of an argument that is never given, which no user could mend.
            warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
            return functools.partial(_flash_attention_4, flash_attn_varlen_func)
    cost = "Attention runs on PyTorch's FlashAttention 2, which takes about twice as long as FlashAttention 4"
    logger.log(level, "%s: %s", cost, reason)
    return _flash_attention_2


def _flash_attention_4(
    function: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scale: float,
    window: None,
) -> Tensor:
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
def _parameters() -> frozenset[str]:
    """The parameters of this PyTorch's varlen_attn, which differ by version."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _options(window: int | None) -> dict[str, Any]:
    """The arguments that ask varlen_attn for a causal mask, a window and shared key heads."""
    shared = {"enable_gqa": True} if "enable_gqa" in _parameters() else {}
    if "window_size" in _parameters():
        return {"window_size": (-1 if window is None else window - 1, 0)} | shared
    if window is not None:
        raise ModelError(
            f"sliding-window attention needs a PyTorch whose varlen_attn has a window_size, and "
            f"{torch.__version__} has none; install requirements-gpu.txt"
        )
    return {"is_causal": True} | shared


def _flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in _parameters() and q.shape[1] != k.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    result: Any = varlen_attn(
        q,
        k,
        v,
        packing.cu_seqlens,
        packing.cu_keys,
        packing.max_length,
        packing.longest,
        scale=scale,
        **_options(window),
    )
    return result
