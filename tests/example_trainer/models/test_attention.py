"""vLLM's attention as a module: both forms against the softmax written out in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from example_trainer.deterministic import VLLMCompatibleFlashAttention
from example_trainer.models.packing import Packing

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence. q: [length, heads, width]; k and v may have fewer heads."""
    q, k, v = (part.double().transpose(0, 1) for part in (q, k, v))
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * WIDTH**-0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ v).transpose(0, 1)


def drawn(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(*shape, count, WIDTH).requires_grad_() for count in heads)
    return q, k, v


@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 9, 4]])
def test_it_is_causal_attention_with_its_gradients(lengths: list[int]) -> None:
    torch.manual_seed(0)
    alike = len(set(lengths)) == 1
    parts = drawn(len(lengths), lengths[0]) if alike else drawn(sum(lengths))
    out = VLLMCompatibleFlashAttention()(*parts, packing=None if alike else Packing(lengths))
    assert out.shape == parts[0].shape
    sequences = zip(*(part.unbind() if alike else part.split(lengths) for part in parts), strict=True)
    expected = [written_out(q, k, v) for q, k, v in sequences]
    wanted = torch.stack(expected) if alike else torch.cat(expected)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(out)
    found = torch.autograd.grad(out, parts, slope)
    for gradient, right in zip(found, torch.autograd.grad(wanted, parts, slope.double()), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused_with_the_shapes() -> None:
    attention = VLLMCompatibleFlashAttention()
    q, k, v = drawn(2, 3)
    with pytest.raises(ValueError, match=r"queries \(2, 3, 4, 8\), keys \(2, 2, 2, 8\).*give \[batch, length"):
        attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="and a packing"):
        attention(q, k, v, Packing([3, 3]))
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key heads evenly"):
        attention(q, *(torch.randn(2, 3, 3, WIDTH) for _ in range(2)))
