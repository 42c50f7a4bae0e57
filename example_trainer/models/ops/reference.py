"""The operations in plain torch, on any device and in any floating dtype, float64 included.

Without totals everything is left to autograd. With them, a matrix's gradient is added to its total
by the function that makes it, and a vector's by `summed`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.models.head import chosen_logprobs as chosen_logprobs
from example_trainer.models.packing import Packing
from example_trainer.models.shards import Split, Total, add_product, summed, wide
from vllm_patching.weights.families import Geometry, RopeScaling

NAME = "reference"


def rotary_table(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """See Operations.rotary_table. Computed in float32 on the CPU; every kind of rope scaling."""
    width = geometry.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies, scaling = 1.0 / (geometry.rope_theta**exponents), geometry.rope_scaling
    if scaling is not None:
        frequencies = _stretch(frequencies, scaling, geometry.rope_theta)
    angles = torch.outer(torch.arange(geometry.max_positions, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if scaling is not None:
        table = table * scaling.magnitude
    return table.to(dtype=dtype, device=device)


def _stretch(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Scale rotary frequencies (radians per position)."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    keep = (_kept_by_yarn if scaling.kind == "yarn" else _kept_by_llama3)(
        frequencies, scaling, theta
    )
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _kept_by_llama3(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """The share of each frequency that stays as it is: all of short wavelengths
    (arXiv:2407.21783).
    """
    # Turns of a pair over the original context.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    if not spread:
        return (turns > scaling.low_freq_factor).float()
    return ((turns - scaling.low_freq_factor) / spread).clamp(0, 1)


def _kept_by_yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """See _kept_by_llama3; linear in the pair's number (arXiv:2309.00071)."""

    def pair(turns: float) -> float:
        """The pair, whole or not, that turns so often over the original context."""
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return len(frequencies) * math.log(wavelength) / math.log(theta)

    first, last = pair(scaling.high_freq_factor), pair(scaling.low_freq_factor)
    if scaling.whole_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    number = torch.arange(len(frequencies), dtype=torch.float32)
    return 1 - ((number - first) / ((last - first) or 0.001)).clamp(0, 1)


class _Linear(torch.autograd.Function):
    """x Wᵀ whose weight gradient is added to a total by the product that makes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: Total) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            add_product(ctx.total(), dy, x)
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packing: Packing | None = None,
    total: Total | None = None,
    bias_total: Total | None = None,
) -> Tensor:
    """See Operations.linear."""
    if total is None:
        return F.linear(x, weight, None if bias is None else summed(bias, bias_total))
    y: Tensor = _Linear.apply(x, weight, total)
    return y if bias is None else y + summed(bias, bias_total)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    split: Split,
    parts: int = 1,
    packing: Packing | None = None,
    total: Total | None = None,
    bias_total: Total | None = None,
) -> Tensor:
    """See Operations.row_linear. The bias is added to the sum."""
    y = split.leave(linear(x, weight, None, packing, total))
    return y if bias is None else y + summed(bias, bias_total)


class _Embedding(torch.autograd.Function):
    """Rows of a matrix, whose gradients are added to a total without a matrix of their own."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, total: Total) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.total = total
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.total().index_add_(0, ids, wide(dy))
        return None, None, None


def embedding(ids: Tensor, weight: Tensor, total: Total | None = None) -> Tensor:
    """See Operations.embedding."""
    if total is None:
        return F.embedding(ids, weight)
    found: Tensor = _Embedding.apply(ids, weight, total)
    return found


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    packing: Packing | None = None,
    total: Total | None = None,
) -> Tensor:
    """See Operations.rms_norm; x may be [tokens, heads, width]. Rounded once, at the end."""
    value = wide(x)
    scaled = value * torch.rsqrt(value.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (scaled * wide(summed(weight, total))).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    packing: Packing | None = None,
    total: Total | None = None,
) -> tuple[Tensor, Tensor]:
    """See Operations.add_rms_norm."""
    added = x + residual
    return rms_norm(added, weight, eps, packing, total), added


def heads(
    qkv: Tensor,
    kv_heads: int,
    head_dim: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    packing: Packing,
    rotary: Tensor,
    totals: tuple[Total | None, Total | None] = (None, None),
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See Operations.heads."""
    kv_size = kv_heads * head_dim
    parts = qkv.split([qkv.shape[1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    q, k, v = parts
    if norms is not None:
        # Rows as long as the weight: heads, or all of them.
        q, k = (part.unflatten(1, (-1, len(w))) for part, w in zip((q, k), norms, strict=True))
        q = rms_norm(q, norms[0], eps, packing, totals[0])
        k = rms_norm(k, norms[1], eps, packing, totals[1])
    q, k, v = (part.reshape(len(qkv), -1, head_dim) for part in (q, k, v))
    cos, sin = rotary[packing.positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved), v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, pairs] (RoFormer)."""
    pairs, width = cos.shape[-1], x.shape[-1]
    if interleaved:
        rotated, rest = x.split([2 * pairs, width - 2 * pairs], dim=-1)
        first, second = rotated.unflatten(-1, (pairs, 2)).unbind(-1)
        both = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((both.flatten(-2), rest), dim=-1)
    first, second, rest = x.split([pairs, pairs, width - 2 * pairs], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None = None
) -> Tensor:
    """See Operations.attention. One call if all spans are alike, else one for each."""
    group = q.shape[1] // k.shape[1]
    if group > 1 and _repeats_heads(q):
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
    count, shape = len(packing.lengths), q.shape
    if not packing.shared and packing.max_length * count == packing.tokens:
        q, k, v = (part.unflatten(0, (count, -1)) for part in (q, k, v))
        mask = _mask(q[0], k[0], window)
        return _attend(q, k, v, mask, scale).reshape(shape)
    if packing.key_rows is not None:
        k, v = k[packing.key_rows], v[packing.key_rows]
    # split, and not slices: the backward pass of each slice would fill a tensor of all tokens.
    spans = zip(q.split(packing.lengths), k.split(packing.seen), v.split(packing.seen), strict=True)
    return torch.cat(
        [_attend(a[None], b[None], c[None], _mask(a, b, window), scale)[0] for a, b, c in spans]
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[spans, queries, heads, head_dim] of queries and of keys and values [spans, keys, kv_heads,
    head_dim]; causal.
    """
    queries, keys, values = (part.transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _mask(q: Tensor, k: Tensor, window: int | None) -> Tensor | None:
    """[queries, keys] where the last query sees every key in its window, the one before it one key
    earlier, and so on. None if causal attention has this mask itself.
    """
    before = len(k) - len(q)
    hides = window is not None and window < len(k)
    if not before and not hides:
        return None
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(before)
    return seen.triu(before + 1 - window) if hides and window is not None else seen


def _repeats_heads(q: Tensor) -> bool:
    """Report if shared key/value heads must be repeated for attention. In float32 none of torch's
    GPU kernels knows shared heads, and the fallback keeps length × length matrices."""
    return q.is_cuda and q.dtype is torch.float32


def silu_and_mul(x: Tensor) -> Tensor:
    """See Operations.silu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """See Operations.gelu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def route(
    logits: Tensor, count: int, renormalised: bool, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See Operations.route."""
    chances = wide(logits).softmax(-1)
    if chosen is None:
        ranked = chances.detach().sort(dim=-1, descending=True, stable=True).indices
        chosen = ranked[:, :count]
    weights = chances.gather(1, chosen)
    if renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    packing: Packing | None = None,
    totals: tuple[Total | None, Total | None] = (None, None),
    split: Split | None = None,
    parts: int = 1,
) -> Tensor:
    """See Operations.experts. One expert after the other; the host waits for their loads."""
    count = chosen.shape[1]
    order = chosen.flatten().sort(stable=True).indices
    loads = chosen.flatten().bincount(minlength=len(gate_up)).tolist()
    pieces = x.index_select(0, order // count).split(loads)
    outputs = []
    # unbind, and not one index each: the backward pass of each would fill a tensor of all experts.
    for expert, matrices in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        if loads[expert]:
            own = [_total_of_expert(total, expert) for total in totals]
            inner = silu_and_mul(linear(pieces[expert], matrices[0], total=own[0]))
            outputs.append(linear(inner, matrices[1], total=own[1]))
    slots = torch.cat(outputs).index_select(0, order.argsort()).unflatten(0, (-1, count))
    added = wide(slots[:, 0]) * weights[:, :1]
    for slot in range(1, count):
        added = added + wide(slots[:, slot]) * weights[:, slot : slot + 1]
    output = added.to(x.dtype)
    return output if split is None else split.leave(output)


def _total_of_expert(total: Total | None, expert: int) -> Total | None:
    return None if total is None else lambda: total()[expert]


def rows(x: Tensor, rows: Tensor, packing: Packing | None = None) -> Tensor:
    """See Operations.rows."""
    return x.index_select(0, rows)
