"""Attention of the self-test: a token's bits as prefill, in chunks, decoded, and decoded among
prefills.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.bits import describe_difference, same_bits
from vllm_patching.batch_invariant.pages import make_page_plan

LENGTHS = (1, 127, 128, 129, 255, 256, 257, 1025, 2049)
CHUNK = 500

Request = tuple[int, int, int]
"""Which sequence, its first new token, and the one past its last."""


def attention_failure(heads: int, kv_heads: int, dim: int, like: torch.Tensor) -> str:
    """Empty, or one line on the first way of computing attention that gives other bits than the
    packed prefill.

    Args:
        heads, kv_heads, dim: of the model.
        like: a tensor of its device and dtype.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    q, k, v = (
        torch.randn(sum(LENGTHS), h, dim, generator=generator, device=like.device).to(like.dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    starts, cu, scale = ends.tolist(), ends.to(like.device, torch.int32), ops.attention_scale(dim)
    whole, _ = ops.attention_varlen(q, k, v, cu, max(LENGTHS), scale)
    plan = make_page_plan(cu, sum(LENGTHS), max(LENGTHS))
    keys, values = plan.lay_out(k, v)

    def batch(requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return vLLM's result of one step with these requests, and the expected one."""
        rows = torch.cat([torch.arange(starts[s] + a, starts[s] + b) for s, a, b in requests]).to(
            like.device
        )
        out = ops.attention_paged(
            q[rows],
            keys,
            values,
            torch.tensor([0, *(b - a for _, a, b in requests)])
            .cumsum(0)
            .to(like.device, torch.int32),
            max(b - a for _, a, b in requests),
            torch.tensor([b for *_, b in requests], device=like.device, dtype=torch.int32),
            max(b for *_, b in requests),
            plan.block_table[
                torch.tensor([s for s, *_ in requests], device=like.device)
            ].contiguous(),
            scale,
        )[0]
        return out, whole[rows]

    for name, requests in _cases().items():
        for request in requests:
            got, expected = batch(request)
            if not same_bits(got, expected):
                return f"attention {name} differs from the prefill of packed sequences: {describe_difference(got, expected)}"
    return _alone(q, k, v, whole, starts, scale)


def _cases() -> dict[str, list[list[Request]]]:
    last = len(LENGTHS) - 1
    decodes = [(s, length - 1, length) for s, length in enumerate(LENGTHS)]
    positions = sorted(
        {
            0,
            1,
            15,
            16,
            17,
            *(p + d for p in (64, 128, 176, 256, 512, 1024) for d in (-1, 0, 1)),
            2000,
            2048,
        }
    )
    return {
        "decoded one at a time": [[(last, p, p + 1)] for p in positions],
        "decoded together": [decodes, [(last, p, p + 1) for p in range(0, LENGTHS[last], 4)]],
        "in chunks": [
            [(last, a, min(a + CHUNK, LENGTHS[last]))] for a in range(0, LENGTHS[last], CHUNK)
        ],
        "decoded among prefills": [
            [(last, 0, LENGTHS[last]), *decodes],
            [*decodes, (7, 0, 64), (last, 700, 1300)],
        ],
    }


def _alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: torch.Tensor,
    starts: Sequence[int],
    scale: float,
) -> str:
    for start, length in zip(starts, LENGTHS, strict=False):
        rows = slice(start, start + length)
        cu = torch.tensor([0, length], device=q.device, dtype=torch.int32)
        alone, _ = ops.attention_varlen(q[rows], k[rows], v[rows], cu, length, scale)
        if not same_bits(alone, whole[rows]):
            difference = describe_difference(alone, whole[rows])
            return f"attention of a sequence of {length} alone differs from it packed: {difference}"
    return ""
