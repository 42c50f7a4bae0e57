"""The backward passes in plain torch: for CPUs, and what the Triton kernels are held against. Any
floating dtype.

Sums over tokens are taken sequence by sequence, in order, each into what the accumulator held
before. So the rest of a bin changes no bit of a sequence. Slices are copied first, because
libraries also look at how memory is aligned.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from example_trainer.models.packing import Packing
from example_trainer.models.shards import wide
from vllm_patching.batch_invariant import reference

_BLOCK = 128
"""Queries whose attention weights exist at the same time."""


def _copy(x: Tensor) -> Tensor:
    return wide(x).clone(memory_format=torch.contiguous_format)


def add_weight_gradient(dy: Tensor, x: Tensor, total: Tensor, packing: Packing) -> None:
    """total [outputs, inputs] += dyᵀ x of dy [tokens, outputs] and x [tokens, inputs], in place."""
    for start, end in packing.spans():
        total += _copy(dy[start:end].t()) @ _copy(x[start:end])


def add_row_sums(dy: Tensor, total: Tensor, packing: Packing) -> None:
    """total [width] += Σ over the rows of dy [tokens, width], in place."""
    add_shares(_shares(dy, packing), total)


def _shares(terms: Tensor, packing: Packing) -> Tensor:
    """The sum over each span's rows of `terms`: [spans, 1, width]."""
    rows = terms.shape[0] // packing.tokens
    sums = [_copy(terms[rows * start : rows * end]).sum(0) for start, end in packing.spans()]
    return torch.stack(sums)[:, None]


def add_shares(shares: Tensor, total: Tensor) -> None:
    """total [width] += the shares [spans, 1, width], one after the other, in place."""
    for share in shares[:, 0]:
        total += share


def norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, extra: Tensor | None, packing: Packing
) -> tuple[Tensor, Tensor]:
    """The backward pass of RMSNorm.

    Args:
        dy, x: [tokens · r, width] with r rows for each token.
        extra: a gradient that reaches x by another way, of its shape.

    Returns:
        dx [tokens · r, width], plus `extra`. The shares of the weight's gradient, for `add_shares`.
    """
    value, slope = wide(x.contiguous()), wide(dy) * wide(weight)
    inverse = (value.square().mean(-1) + eps).rsqrt()[:, None]
    normed = value * inverse
    result = inverse * (slope - normed * (slope * normed).mean(-1)[:, None])
    if extra is not None:
        result = result + wide(extra)
    return result.to(x.dtype), _shares(wide(dy) * normed, packing)


def heads_gradient(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    packing: Packing,
    table: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradients from rotated queries and keys, and from values, to the product that they come from.

    Args:
        dq: [tokens, heads, head_dim]; dk, dv: [tokens, kv_heads, head_dim].
        qkv: [tokens, (heads + 2 · kv_heads) · head_dim].
        norms: weights [head_dim] of the norms of queries and keys.
        table: [positions, rotary_dim], cosines then sines.
        interleaved: neighbours are rotated, instead of the halves.

    Returns:
        The gradient of qkv. With norms, the shares of both weights' gradients, for `add_shares`.
    """
    head_dim = dq.shape[2]
    cos, sin = wide(table).chunk(2, dim=-1)
    # A rotation's transpose is the rotation back.
    turned = reference.rotary_embedding(
        packing.positions, wide(dq), wide(dk), head_dim, torch.cat((cos, -sin), -1), interleaved
    )
    parts = qkv.view(len(qkv), -1, head_dim).split([dq.shape[1], dk.shape[1], dv.shape[1]], 1)
    slopes, shares = list(turned), list[Tensor]()
    for number, weight in enumerate(norms or ()):
        rows, values = slopes[number], wide(parts[number])
        dx, share = norm_gradient(
            rows.reshape(-1, head_dim), values.reshape(-1, head_dim), weight, eps, None, packing
        )
        slopes[number] = dx.view(rows.shape)
        shares.append(share)
    joined = torch.cat((*slopes, wide(dv)), dim=1).to(qkv.dtype).flatten(1)
    return joined, torch.stack(shares) if shares else None


def silu_and_mul_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient for x [rows, 2 · width] of silu_and_mul, from dy [rows, width]."""
    gate, up = wide(x).chunk(2, dim=-1)
    slope, chance = wide(dy), torch.sigmoid(gate)
    return torch.cat(
        (slope * up * chance * (1 + gate * (1 - chance)), slope * gate * chance), dim=-1
    ).to(x.dtype)


def expert_gradient(slope: Tensor, inner: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows of experts behind the down projection.

    Args:
        slope: [rows, width], the gradient of a token's output through the down projection, without
            the row's weight.
        inner: [rows, 2 · width], outputs of gate and up projection.
        weights: [rows], of the expert in its token's sum.

    Returns:
        The gradient of `inner`; the gated MLP's inner values times the weights; the gradient of the
        weights.
    """
    gate, up = wide(inner).chunk(2, dim=-1)
    values, scale = wide(slope), weights[:, None]
    gated = gate * torch.sigmoid(gate) * up
    # One row at a time, in an order that the number of rows cannot change.
    products = (values * gated).double().cumsum(-1)[:, -1]
    d_inner = silu_and_mul_gradient(values * scale, wide(inner))
    return d_inner.to(inner.dtype), (gated * scale).to(inner.dtype), products.to(weights.dtype)


def add_expert_gradient(dy: Tensor, x: Tensor, total: Tensor, bounds: Tensor) -> None:
    """total [experts, outputs, inputs] += dyᵀ x over the rows of each expert, in place.

    Args:
        dy: [rows, outputs]; x: [rows, inputs], sorted by expert.
        bounds: [experts, spans + 1], the first row of each span among an expert's rows.
    """
    for expert, firsts in enumerate(bounds.tolist()):
        for start, end in itertools.pairwise(firsts):
            if end > start:
                total[expert] += _copy(dy[start:end].t()) @ _copy(x[start:end])


def add_embedding_gradient(dy: Tensor, ids: Tensor, total: Tensor) -> None:
    """total [vocab, width] gets dy [tokens, width] added at ids [tokens], in the tokens' order, in
    place.
    """
    sorted_ids, order = torch.sort(ids, stable=True)
    place = torch.arange(len(ids), device=ids.device)
    first = torch.searchsorted(sorted_ids, sorted_ids)  # where the run of equal ids begins
    round_of = place - first
    for turn in range(int(round_of.max()) + 1 if len(ids) else 0):
        chosen = round_of == turn  # no id twice in a turn
        total[sorted_ids[chosen]] += wide(dy[order[chosen]])


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    upstream: Tensor,
    *,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """upstream · (onehot(target) - softmax(logits)), [rows, vocab] in the logits' dtype.

    Args:
        targets: columns; a number that is not a column belongs to another rank.
        entropy: that of each row and the gradient that reaches it, both [rows], if one does: less
            that gradient · softmax · (log softmax + entropy).
    """
    rows = ((targets >= 0) & (targets < logits.shape[1])).nonzero().squeeze(1)
    columns = targets[rows]
    if entropy is not None:
        entropies, entropy_upstream = (column[:, None] for column in entropy)
        slope = wide(logits) - lse[:, None]
        chances = slope.exp()
        slope = (
            slope.add_(entropies)
            .mul_(entropy_upstream)
            .add_(upstream[:, None])
            .mul_(chances.neg_())
        )
        slope[rows, columns] += upstream[rows]
        return slope.to(logits.dtype)
    slope = torch.exp(wide(logits) - lse[:, None]).neg_()
    slope[rows, columns] += 1
    return (slope * upstream[:, None]).to(logits.dtype)


def entropy(logits: Tensor, lse: Tensor) -> Tensor:
    """Entropy [rows] of softmax(logits [rows, vocab]), in nats."""
    logprobs = wide(logits) - lse[:, None]
    return -(logprobs.exp() * logprobs).sum(-1)


def attention_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of causal attention over packed sequences; the weights of a block of queries are
    made again from `lse`.

    The gradients of keys that several spans see are added in the order of the spans.

    Args:
        upstream, out: [tokens, heads, width] gradient of the output, and the output.
        q: [tokens, heads, width]; k, v: [tokens, kv_heads, width].
        lse: [heads, tokens] natural logarithm of each query's softmax denominator.
        packing: the spans.
        scale: factor of the scores.

    Returns:
        dq, dk, dv in the inputs' dtypes.
    """
    dq, (dk, dv) = torch.empty_like(q), (torch.zeros_like(wide(part)) for part in (k, v))
    for (start, end), seen in zip(packing.spans(), packing.rows_seen, strict=True):
        rows, keys = slice(start, end), seen.to(k.device)
        dq[rows], of_keys, of_values = _span_gradient(
            upstream[rows], q[rows], out[rows], k[keys], v[keys], lse[:, rows], scale
        )
        dk[keys] += of_keys
        dv[keys] += of_values
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _span_gradient(
    upstream: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, in the dtype of q, and wide dk and dv of the last queries of a sequence; see
    attention_backward.
    """
    length, heads, width = q.shape
    kv_heads, before = k.shape[1], len(k) - length
    # [kv_heads, queries of the group's heads or keys, width]
    grouped = (kv_heads, heads // kv_heads, length, width)
    queries, slopes, outputs = (
        _copy(part.transpose(0, 1)).view(grouped) for part in (q, upstream, out)
    )
    keys, values = (_copy(part.transpose(0, 1)) for part in (k, v))
    denominators = _copy(lse).view(grouped[:3])
    delta = (slopes * outputs).sum(-1)
    query_total = torch.empty_like(queries)
    key_total, value_total = torch.zeros_like(keys), torch.zeros_like(values)
    for head in range(heads // kv_heads):
        for first in range(0, length, _BLOCK):
            rows = slice(first, min(first + _BLOCK, length))
            seen = slice(0, before + rows.stop)
            block, slope = queries[:, head, rows].contiguous(), slopes[:, head, rows].contiguous()
            scores = torch.einsum("hqd,hkd->hqk", block, keys[:, seen]) * scale
            chance = torch.exp(scores - denominators[:, head, rows, None])
            query, key = torch.arange(before, len(k))[rows], torch.arange(len(k))[seen]
            chance = chance.masked_fill((key[None, :] > query[:, None]).to(chance.device), 0)
            value_total[:, seen] += torch.einsum("hqk,hqd->hkd", chance, slope)
            step = torch.einsum("hqd,hkd->hqk", slope, values[:, seen])
            step = chance * (step - delta[:, head, rows, None]) * scale
            query_total[:, head, rows] = torch.einsum("hqk,hkd->hqd", step, keys[:, seen])
            key_total[:, seen] += torch.einsum("hqk,hqd->hkd", step, block)
    dq = query_total.view(heads, length, width).transpose(0, 1).to(q.dtype)
    return dq, key_total.transpose(0, 1), value_total.transpose(0, 1)
