"""Attention's backward pass by FlashAttention 4's deterministic kernel for Hopper, which vLLM brings
with it.

The sources in vLLM 0.26 and 0.33, whose kernel is the same, fix the order of sums:

* A program owns a block of 128 keys of one query head and keeps its dk and dv in registers. It adds
  block after block of queries, the earliest first.
* Programs add to `dq` in float32, and to `dk` and `dv` where query heads share a key head. A
  counter for each block of each sequence and head lets them in one after the other. For `dq` the
  order is from the last block of keys that its queries see to the first. For `dk` and `dv` it is
  from a group's first query head to its last. Adding begins at zero.
* Blocks are counted from the beginning of each sequence, and their sizes depend on the width alone.
  Rows of the next sequence in a sequence's last block get probability zero.

So the order depends on the sequence alone. The longest length and more than 256 sequences choose
other compilations of the same arithmetic. That those agree in bits, and that a sequence has the
same bits alone and in a bin, tests/gpu/attention_checks.py shows. `lse` is the natural logarithm,
[heads, tokens], as our forward pass keeps it.

The waiting programs rely on the GPU to start programs in the order of their numbers.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.packing import Packing

logger = logging.getLogger(__name__)
_HOPPER = 9
_WIDEST_HEAD = 128


def refusal(q: Tensor) -> str:
    """Why queries [tokens, heads, width] cannot have this backward pass; empty if they can."""
    if not q.is_cuda:
        return "FlashAttention 4 has kernels for GPUs alone"
    if (major := torch.cuda.get_device_capability(q.device)[0]) != _HOPPER:
        return f"the order of its sums is known for compute capability 9, not {major}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention 4 takes 16-bit numbers, not {q.dtype}"
    if q.shape[2] > _WIDEST_HEAD or q.shape[2] % 8:
        return f"heads have {q.shape[2]} dimensions: at most {_WIDEST_HEAD}, in eights, can be"
    found = _library()
    return found if isinstance(found, str) else ""


@functools.cache
def _library() -> Callable[..., Any] | str:
    """FlashAttention 4's function for a backward pass, or why it cannot be imported.

    vLLM's public function remembers its own forward pass, and ours is FlashAttention 3's.
    """
    try:
        from vllm.vllm_flash_attn.cute.interface import _flash_attn_bwd
    except ImportError as error:
        return f"FlashAttention 4 cannot be imported from vLLM ({error})"
    # Its compiler warns of an argument that is never given, which no user could mend.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    backward: Callable[..., Any] = _flash_attn_bwd
    return backward


def usable(q: Tensor) -> bool:
    """Report if queries can have this backward pass. On a Hopper GPU the log names the
    reason once if not.
    """
    reason = refusal(q)
    if reason and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == _HOPPER:
        _say_once(reason)
    return not reason


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning(
        "Attention's backward pass runs on our Triton kernel, which takes about twice as long as FlashAttention 4 "
        "for long sequences: %s; install requirements-gpu.txt",
        reason,
    )


def attention_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing,
    scale: float,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """See triton_attention.attention_backward.

    Args:
        deterministic: False, to measure what the order costs: programs add when they come.

    Raises:
        ModelError: these tensors cannot have it (`refusal`).
    """
    if reason := refusal(q):
        raise ModelError(reason)
    backward = _library()
    assert not isinstance(backward, str)
    dq, dk, dv = (torch.empty(part.shape, dtype=q.dtype, device=q.device) for part in (q, k, v))
    backward(
        q, k, v, out.contiguous(), upstream.contiguous(), lse.contiguous(), scale, causal=True,
        cu_seqlens_q=packing.cu_seqlens, cu_seqlens_k=packing.cu_seqlens,
        max_seqlen_q=packing.max_length, max_seqlen_k=packing.max_length,
        deterministic=deterministic, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return dq, dk, dv
