"""The operations on a CPU: slow, but a row's bits do not depend on its neighbours, and a value's
not on the number of columns.

Exponentials are taken in float64 and rounded back. A library computes the last few of a row by
other code than the ones before, and the two differ in a float32's last bit.

Any floating dtype.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_patching.batch_invariant.ops import SeenKeys

_SHORT = 16
"""Columns that linear adds before it adds their sum to the others."""


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in] @ weight[out, in].T, each value a sum in the order of the columns, rounded once.

    Only multiplications and additions of whole tensors, element by element: a library's product
    orders the sums by the number of rows and of outputs. Short sums are added up, which loses less
    than one long sum.
    """
    total = _wide(x[:0]).new_zeros(len(x), len(weight))
    part, product = torch.empty_like(total), torch.empty_like(total)
    for rows, columns in zip(
        _wide(x).t().split(_SHORT), _wide(weight).t().contiguous().split(_SHORT), strict=True
    ):
        part.zero_()
        for of_x, of_weight in zip(rows, columns, strict=True):
            part += torch.mul(of_x.unsqueeze(1), of_weight, out=product)
        total += part
    return total.to(x.dtype)


def add_parts(parts: torch.Tensor) -> torch.Tensor:
    """See ops.add_parts."""
    total = _wide(parts[0])
    for part in parts[1:]:
        total = total + _wide(part)
    return total.to(parts.dtype, copy=True)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.rms_norm."""
    rows = _wide(x.contiguous())
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * scale * _wide(weight)).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.fused_add_rms_norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.rotary_embedding."""
    cos, sin = cos_sin_cache[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(x.shape[0], -1, head_dim)
        turned, rest = heads.tensor_split([cos_sin_cache.shape[1]], dim=-1)
        if interleaved:
            first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = turned.chunk(2, dim=-1)
        both = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
        return torch.cat((joined, rest), dim=-1).reshape(x.shape)

    return rotate(q), rotate(k)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See ops.silu_and_mul; rounded once."""
    gate, up = x.double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def route(
    logits: torch.Tensor, count: int, renormalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.route."""
    chances = torch.softmax(_wide(logits.contiguous()), dim=-1)
    chosen = chances.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    weights = chances.gather(1, chosen)
    if renormalised:
        total = weights[:, 0].clone()
        for slot in range(1, count):
            total += weights[:, slot]
        weights = weights / total[:, None]
    return weights, chosen.contiguous()


def assign(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """See ops.assign."""
    ranked, order = chosen.reshape(-1).sort(stable=True)
    numbers = torch.arange(max(experts, len(order)))
    places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    ends = torch.searchsorted(ranked, numbers[:experts], right=True, out_int32=True)
    return order, order // chosen.shape[1], places, ends


def expert_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """See ops.expert_linear."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = linear(rows[start:end], weight[expert].contiguous())
        start = end
    return out


def weighted_sum(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ops.weighted_sum."""
    slots = _wide(rows[places]).unflatten(0, weights.shape)
    total = slots[:, 0] * weights[:, :1]
    for slot in range(1, weights.shape[1]):
        total += slots[:, slot] * weights[:, slot : slot + 1]
    return total.to(rows.dtype)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    shared: SeenKeys | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.attention_varlen.

    One query at a time: a token has the bits of decoding it, however its sequence goes on.
    """
    group = q.shape[1] // k.shape[1]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q[:0]).dtype)
    bounds = cu_seqlens
    if shared is not None:
        k, v, bounds = k[shared.rows], v[shared.rows], shared.cu
    for (start, end), (first, last) in zip(
        pairwise(cu_seqlens.tolist()), pairwise(bounds.tolist()), strict=True
    ):
        keys = (
            _wide(k[first:last]).repeat_interleave(group, dim=1).transpose(0, 1).contiguous()
        )  # [heads, keys, dim]
        values = _wide(v[first:last]).repeat_interleave(group, dim=1).transpose(0, 1).contiguous()
        for token in range(start, end):
            seen = last - first - (end - token) + 1
            scores = (keys[:, :seen] * _wide(q[token]).unsqueeze(1)).sum(
                -1
            ) * scale  # [heads, seen]
            total = _log_sum_exp(scores)
            weights = torch.exp((scores - total.unsqueeze(-1)).double()).to(scores.dtype)
            out[token] = (values[:, :seen] * weights.unsqueeze(-1)).sum(1).to(q.dtype)
            lse[:, token] = total
    return out, lse


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """See ops.log_sum_exp."""
    return _log_sum_exp(_wide(logits.contiguous()))


def _log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x.double(), dim=-1).to(x.dtype)
