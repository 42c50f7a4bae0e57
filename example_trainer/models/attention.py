"""vLLM's attention as a module with gradients, for models that are put together elsewhere."""

from __future__ import annotations

from torch import Tensor, nn

from example_trainer.models.ops import invariant
from example_trainer.models.packing import Packing


class VLLMCompatibleFlashAttention(nn.Module):
    """Causal attention: vLLM's FlashAttention with one split forward, a fixed order of sums backward. No parameters.

    Example:
        attention = VLLMCompatibleFlashAttention()
        out = attention(q, k, v)                             # [batch, length, heads, head_dim], all of one length
        out = attention(q, k, v, Packing([3, 500, 12]))      # [tokens, heads, head_dim], any lengths
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = None, scale: float | None = None) -> Tensor:
        """Attend.

        Args:
            q: [batch, length, heads, head_dim], or [tokens, heads, head_dim] of packed sequences.
            k, v: the same with as many heads, or a number that divides it.
            packing: the packed sequences.
            scale: factor of the scores; not given: head_dim ** -0.5.

        Returns:
            the shape and dtype of q.

        Raises:
            ValueError: the shapes fit neither form.
        """
        if q.dim() != (4 if packing is None else 3) or k.shape != v.shape or q.shape[:-2] != k.shape[:-2]:
            raise ValueError(
                f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}: give [batch, length, heads, "
                "head_dim] each, or [tokens, heads, head_dim] each and a packing"
            )
        if q.shape[-2] % k.shape[-2]:
            raise ValueError(f"{q.shape[-2]} query heads cannot share {k.shape[-2]} key heads evenly")
        shape = q.shape
        if packing is None:
            packing = Packing([shape[1]] * shape[0], q.device)
            q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        return invariant.attention(q, k, v, packing, scale or float(shape[-1] ** -0.5)).view(shape)
