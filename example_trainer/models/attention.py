"""vLLM's attention with gradients, for models that are put together elsewhere: a module and an
autograd function.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from example_trainer.models.ops import invariant
from example_trainer.models.packing import Packing


class VLLMCompatibleFlashAttention(nn.Module):
    """Causal attention: vLLM's FlashAttention with one split forward, a fixed order of sums
    backward. No parameters.

    The axes are as in TorchTitan and in torch's scaled_dot_product_attention: heads before length.
    Packed sequences have one dimension less, so no shape can be read in two ways.

    Example:
        attention = VLLMCompatibleFlashAttention()
        out = attention(q, k, v)                                     # [batch, heads, length, head_dim]
        out = attention(q, k, v, enable_gqa=True)                    # k and v have fewer heads
        out = attention(q, k, v, packing=Packing([3, 500, 12]))      # [tokens, heads, head_dim], any lengths
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        packing: Packing | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            q: [batch, heads, length, head_dim]; with a packing [tokens, heads, head_dim].
            k, v: the same; with `enable_gqa` a number of heads that divides q's.
            scale: factor of the scores; not given: head_dim ** -0.5.
            enable_gqa: k and v may have fewer heads than q, as in grouped-query attention.
            packing: the packed sequences.

        Returns:
            The shape, axes and dtype of q.

        Raises:
            ValueError: the shapes fit neither form, or the heads differ without `enable_gqa`.
        """
        _check_shapes(q, k, v, packing, enable_gqa)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        if packing is not None:
            return invariant.attention(q, k, v, packing, float(factor))
        batch, _, length, _ = q.shape
        queries, keys, values = (
            part.transpose(1, 2).contiguous().flatten(0, 1) for part in (q, k, v)
        )
        out = invariant.attention(
            queries, keys, values, Packing([length] * batch, q.device), float(factor)
        )
        return out.unflatten(0, (batch, length)).transpose(1, 2)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, enable_gqa: bool
) -> None:
    """Raise ValueError unless queries, keys and values fit together.

    In both forms the heads are dimension 1.
    """
    given = f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
    dimensions = 4 if packing is None else 3
    same = all(
        one == other
        for axis, (one, other) in enumerate(zip(q.shape, k.shape, strict=False))
        if axis != 1
    )
    if q.dim() != dimensions or k.dim() != dimensions or k.shape != v.shape or not same:
        if packing is None:
            raise ValueError(
                f"{given}: give [batch, heads, length, head_dim] each; packed sequences need packing="
            )
        raise ValueError(f"{given}: give [tokens, heads, head_dim] each, beside packing=")
    if packing is not None and packing.tokens != len(q):
        raise ValueError(f"{given}: the packing has {packing.tokens} tokens")
    if q.shape[1] == k.shape[1]:
        return
    if not enable_gqa:
        raise ValueError(
            f"{given}: {k.shape[1]} key heads for {q.shape[1]} query heads need enable_gqa=True"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")


class FlashAttnWithBackward(torch.autograd.Function):
    """Attention of packed sequences of any lengths, by their boundaries, as FlashAttention's own
    functions take them.

    Example:
        out = FlashAttnWithBackward.apply(q, k, v, cu_seqlens, max_seqlen, scale)

    `apply` has the arguments of `forward`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float | None = None,
        num_splits: int = 1,
    ) -> Tensor:
        """Attend.

        Args:
            ctx: autograd's.
            q: [tokens, heads, head_dim].
            k, v: [tokens, kv_heads, head_dim]; kv_heads divides heads.
            cu_seqlens: [sequences + 1] int32: where each sequence begins, then the number of
                tokens.
            max_seqlen: length of the longest sequence.
            scale: factor of the scores; not given: head_dim ** -0.5.
            num_splits: 1, the only number with which the bits do not depend on the batch.

        Returns:
            [tokens, heads, head_dim] in q's dtype.

        Raises:
            ValueError: the boundaries do not fit the tokens, or num_splits is not 1.
        """
        if num_splits != 1:
            raise ValueError(
                f"num_splits {num_splits}: give 1; with others the bits depend on the batch"
            )
        bounds = cu_seqlens.tolist()
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        if (
            not lengths
            or bounds[0] != 0
            or bounds[-1] != len(q)
            or min(lengths) < 0
            or max(lengths) > max_seqlen
        ):
            raise ValueError(
                f"cu_seqlens {bounds} with max_seqlen {max_seqlen} do not fit {len(q)} tokens. "
                "Begin with 0, end with the number of tokens, and give the length of the longest "
                "sequence"
            )
        factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
        return invariant.Attention.forward(
            ctx, q, k, v, Packing([n for n in lengths if n], q.device), factor
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v; the sums have one order."""
        return *invariant.Attention.backward(ctx, dy)[:3], None, None, None, None
