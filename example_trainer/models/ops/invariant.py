"""The operations whose bits are vLLM's. Forward: the kernels that vLLM runs. Backward: ours, every
sum in a fixed order.

With totals, the sum over a step's tokens is taken in the order of the tokens, with one rounding at
the end. It does not matter how the tokens were spread over passes. Where spans continue others, the
outputs have the bits of whole sequences. The gradients of what spans share are added in the order
of the spans in their bin. So they repeat with equal bins, and whole sequences have gradients of
other bits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.errors import ModelError
from example_trainer.models.head import check_temperature
from example_trainer.models.ops import mixture, torch_gradients
from example_trainer.models.packing import TILE, Packing
from example_trainer.models.shards import Split, Total, deliver, wide
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.weights.families import Geometry

NAME = "invariant"


def gradients_for(x: Tensor) -> ModuleType:
    """The backward passes for a tensor's device: Triton kernels on a GPU (or under Triton's
    interpreter), else torch.
    """
    if x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        from example_trainer.models.ops import triton_gradients

        return triton_gradients
    return torch_gradients


def rotary_table(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """vLLM's table [max_positions, rotary_dim]. It computes it on the device, and a GPU's cosine is
    not a CPU's in the last bit.

    Raises:
        ModelError: a part of the model has no invariant operations.
    """
    g = geometry
    if g.inexact:
        raise ModelError(
            f"{g.inexact} has no deterministic mode yet; train without --deterministic"
        )
    return ops.rotary_table(g.rotary_dim, g.max_positions, g.rope_theta, dtype, device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packing: Packing,
        totals: tuple[Total | None, Total | None],
        split: Split,
        share: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.packing, ctx.totals = packing, totals
        if split.size == 1:
            return ops.row_linear(x, weight, share, bias)
        first_bias = bias if split.rank == 0 else None
        products = ops.row_parts(x, weight, share, first_bias)
        return ops.add_parts(split.gather_parts(products))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        gradients = gradients_for(dy)
        dy = dy.contiguous()
        dx = ops.linear(dy, weight.t()) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = deliver(
                weight,
                ctx.totals[0],
                lambda total: gradients.add_weight_gradient(dy, x, total, ctx.packing),
            )
        if bias is not None and ctx.needs_input_grad[2]:
            db = deliver(
                bias, ctx.totals[1], lambda total: gradients.add_row_sums(dy, total, ctx.packing)
            )
        return dx, dw, db, None, None, None, None


_WHOLE = Split()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packing: Packing | None = None,
    total: Total | None = None,
    bias_total: Total | None = None,
) -> Tensor:
    """See Operations.linear; x may be [..., inputs].

    Without a packing all rows are one sequence.
    """
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = _Linear.apply(
        flat,
        weight,
        bias,
        packing or Packing([len(flat)], x.device),
        (total, bias_total),
        _WHOLE,
        1,
    )
    return y.view(*x.shape[:-1], weight.shape[0])


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
    """See Operations.row_linear.

    Forward: each rank computes its share of the parts. All ranks' parts are gathered in the order
    of the ranks, and every rank adds all of them. The bits equal vLLM's with `parts`
    tensor-parallel ranks, for every number of trainer ranks that divides `parts`.

    Backward: each part gets the gradient of the sum, as if nothing were rounded. The gradient of x
    is then one product over all columns of this rank, and so is that of the weight. Both are
    computed as in `linear`: exactly repeatable, and independent of `parts`. The weight gradient of
    a column does not depend on the number of trainer ranks.

    Raises:
        ValueError: the ranks cannot compute equal shares of the parts.
    """
    share = SumPlan(parts).parts_of_rank(split.size)
    packing = packing or Packing([len(x)], x.device)
    totals = total, bias_total
    y: Tensor = _Linear.apply(x, weight, bias, packing, totals, split, share)
    return y


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., inner] @ b [inner, outputs], the same product as `linear`'s."""
    return linear(a, b.t())


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        packing: Packing,
        total: Total | None,
    ) -> Any:
        ctx.eps, ctx.packing, ctx.total, ctx.fused = eps, packing, total, residual is not None
        ctx.set_materialize_grads(False)
        if residual is None:
            ctx.save_for_backward(x, weight)
            return ops.rms_norm(x, weight, eps)
        y, summed = ops.fused_add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(summed, weight)
        return y, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, extra = (*upstream, None)[:2]
        dw = None
        if dy is None:
            dx = extra
        else:
            gradients = gradients_for(x)
            rows, flat = dy.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1])
            extra = None if extra is None else extra.reshape(rows.shape)
            dx, shares = gradients.norm_gradient(rows, flat, weight, ctx.eps, extra, ctx.packing)
            dx = dx.view(x.shape)
            if ctx.needs_input_grad[2]:
                dw = deliver(weight, ctx.total, lambda total: gradients.add_shares(shares, total))
        return dx, dx if ctx.fused else None, dw, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    packing: Packing | None = None,
    total: Total | None = None,
) -> Tensor:
    """See Operations.rms_norm; x may be [tokens, heads, width]."""
    y: Tensor = _RMSNorm.apply(x, None, weight, eps, packing or Packing([len(x)], x.device), total)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    packing: Packing | None = None,
    total: Total | None = None,
) -> tuple[Tensor, Tensor]:
    """See Operations.add_rms_norm."""
    y, summed = _RMSNorm.apply(
        x, residual, weight, eps, packing or Packing([len(x)], x.device), total
    )
    return y, summed


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return ops.silu_and_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1])
        dx: Tensor = gradients_for(x).silu_and_mul_gradient(dy.reshape(len(flat), -1), flat)
        return dx.view(x.shape)


def silu_and_mul(x: Tensor) -> Tensor:
    """See Operations.silu_and_mul."""
    y: Tensor = _SiluAndMul.apply(x)
    return y


def gelu_and_mul(x: Tensor) -> Tensor:
    """See Operations.gelu_and_mul."""
    raise ValueError("the invariant operations have no gelu_and_mul; use another table")


def route(
    logits: Tensor, count: int, renormalised: bool, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See Operations.route."""
    return mixture.route(logits, count, renormalised, chosen)


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
    """See Operations.experts; parts as in `row_linear`.

    An expert's gradient is summed in the order of the tokens.
    """
    begins = (packing or Packing([len(x)], x.device)).cu_seqlens
    kernels = mixture.Kernels(ops.silu_and_mul, gradients_for(x))
    return mixture.experts(
        x, weights, chosen, gate_up, down, begins, totals, kernels, split or _WHOLE, parts
    )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        head_dim: int,
        table: Tensor,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, table)
        ctx.head_dim, ctx.interleaved = head_dim, interleaved
        return ops.rotary_embedding(positions, q, k, head_dim, table, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        # A rotation's transpose is the rotation back.
        positions, table = ctx.saved_tensors
        cos, sin = table.chunk(2, dim=-1)
        mirrored = torch.cat((cos, -sin), dim=-1)
        dq, dk = ops.rotary_embedding(
            positions,
            dq.contiguous(),
            dk.contiguous(),
            ctx.head_dim,
            mirrored,
            ctx.interleaved,
        )
        return dq, dk, None, None, None, None


def rotary_embedding(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    head_dim: int,
    table: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of each head by its position (RoFormer); see Operations.heads.

    Args:
        positions: [tokens] int64.
        q, k: [tokens, heads, head_dim], each with its own number of heads.
        table: [positions, rotary_dim], cosines then sines.
    """
    rotated, rotated_k = _Rotary.apply(q, k, positions, head_dim, table, interleaved)
    return rotated, rotated_k


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        kv_heads: int,
        head_dim: int,
        eps: float,
        packing: Packing,
        rotary: Tensor,
        totals: tuple[Total | None, Total | None],
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, q_weight, k_weight, rotary)
        ctx.eps, ctx.packing, ctx.totals, ctx.interleaved = eps, packing, totals, interleaved
        q, k, v = qkv.view(len(qkv), -1, head_dim).tensor_split((-2 * kv_heads, -kv_heads), dim=1)
        made_here = False
        if q_weight is not None and k_weight is not None:
            q, k = ops.rms_norm(q, q_weight, eps), ops.rms_norm(k, k_weight, eps)
            made_here = True
        q, k = ops.rotary_embedding(
            packing.positions, q, k, head_dim, rotary, interleaved, in_place=made_here
        )
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, *weights, rotary = ctx.saved_tensors
        norms = None if weights[0] is None else weights
        gradients = gradients_for(qkv)
        dqkv, shares = gradients.heads_gradient(
            dq, dk, dv, qkv, norms, ctx.eps, ctx.packing, rotary, ctx.interleaved
        )
        of_weights: list[Tensor | None] = [None, None]
        for number, share in enumerate(() if shares is None else shares):
            if ctx.needs_input_grad[1 + number]:
                add = functools.partial(gradients.add_shares, share)
                of_weights[number] = deliver(weights[number], ctx.totals[number], add)
        return dqkv, *of_weights, None, None, None, None, None, None, None


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
    q_weight, k_weight = norms or (None, None)
    q, k, v = _Heads.apply(
        qkv, q_weight, k_weight, kv_heads, head_dim, eps, packing, rotary, totals, interleaved
    )
    return q, k, v


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> Tensor:
        rows = packing.key_rows
        shared = None if rows is None else ops.SeenKeys(rows, packing.cu_keys, packing.longest)
        out, lse = ops.attention_varlen(
            q, k, v, packing.cu_seqlens, packing.max_length, scale, shared
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = gradients_for(dy)
        dq, dk, dv = gradients.attention_backward(dy, *ctx.saved_tensors, ctx.packing, ctx.scale)
        return dq, dk, dv, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None = None
) -> Tensor:
    """See Operations.attention."""
    if window is not None:
        raise ValueError("the invariant operations have no sliding window; use another table")
    if not packing.nested:
        raise ValueError(
            f"parents {list(packing.parents)}: the invariant operations add the gradients of a span's "
            "keys in one walk; pack each span right behind the spans that it continues"
        )
    out: Tensor = Attention.apply(q, k, v, packing, scale)
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, total: Total | None) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.total = total
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        add = gradients_for(dy).add_embedding_gradient
        return None, deliver(weight, ctx.total, lambda total: add(dy, ids, total)), None


def embedding(ids: Tensor, weight: Tensor, total: Total | None = None) -> Tensor:
    """See Operations.embedding. The gradients of a repeated id are added in the tokens' order."""
    rows: Tensor = _Embedding.apply(ids, weight, total)
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, repeated: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.repeated = x.shape, repeated
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        if not ctx.repeated:
            return dy.new_zeros(ctx.shape).index_copy_(0, rows, dy), None, None
        total = wide(dy[:0]).new_zeros(ctx.shape)
        gradients_for(dy).add_embedding_gradient(dy, rows, total)
        return total.to(dy.dtype), None, None


def rows(x: Tensor, rows: Tensor, packing: Packing | None = None) -> Tensor:
    """See Operations.rows.

    A row that is chosen once has its gradient copied back. The gradients of a row that is chosen
    several times are added in the order of the choices; torch's own would add them atomically.
    """
    chosen: Tensor = _Rows.apply(x, rows, packing is not None and packing.repeated)
    return chosen


class _ChosenLogprobs(torch.autograd.Function):
    """Logits exist for a chunk of tokens at a time, in both directions; a chunk is a whole number
    of tiles.

    Ranks that split the rows of the matrix gather their logits, as vLLM's ranks do, and each takes
    the same sums of whole rows. In the backward pass each makes the slopes of its own columns. The
    gradients of the states are added in the order of the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        packing: Packing,
        chunk: int,
        total: Total | None,
        entropy_gradient: bool,
        split: Split,
        vocab: int,
    ) -> tuple[Tensor, Tensor]:
        padded = _padded_head(weight, split)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start, part in _chunks(packing, chunk):
            rows, ids = hidden[start : start + part.tokens], targets[start : start + part.tokens]
            logits = _gathered(ops.linear(rows, padded), split)[:, :vocab]
            lse = ops.log_sum_exp(logits)  # what ops.chosen_logprobs does, keeping the denominators
            logprobs = logits.gather(1, ids[:, None]).squeeze(1).to(lse.dtype) - lse
            parts.append((logprobs, gradients_for(logits).entropy(logits.contiguous(), lse), lse))
        logprobs, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.packing, ctx.chunk, ctx.total = packing, chunk, total
        ctx.split, ctx.span = split, split.vocabulary_range(vocab)
        if entropy_gradient:
            ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        else:
            ctx.save_for_backward(hidden, weight, targets, lse)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, *entropies = ctx.saved_tensors
        upstream, entropy_upstream = (one.contiguous() for one in arriving)
        gradients, (first, end) = gradients_for(hidden), ctx.span
        held = end - first
        padded, back = _padded_head(weight, ctx.split), weight[:held].t()
        hidden_gradient = torch.zeros_like(hidden)

        def walk(add: Callable[[Tensor, Tensor, Packing], object]) -> None:
            for start, part in _chunks(ctx.packing, ctx.chunk):
                if not held:  # this rank has rows of padding alone
                    break
                rows = slice(start, start + part.tokens)
                logits = ops.linear(hidden[rows], padded)[:, :held].contiguous()
                entropy = None
                if entropies:
                    entropy = entropies[0][rows], entropy_upstream[rows]
                slope = gradients.logit_gradient(
                    logits, targets[rows] - first, lse[rows], upstream[rows], entropy=entropy
                )
                hidden_gradient[rows] = ops.linear(slope, back)
                add(slope, hidden[rows], part)

        dw = None
        if ctx.needs_input_grad[1]:
            dw = deliver(
                weight,
                ctx.total,
                lambda total: walk(
                    lambda dy, x, part: gradients.add_weight_gradient(dy, x, total[:held], part)
                ),
            )
        else:
            walk(lambda dy, x, part: None)
        hidden_gradient = ctx.split.total(hidden_gradient)
        return hidden_gradient, dw, None, None, None, None, None, None, None


def _gathered(logits: Tensor, split: Split) -> Tensor:
    """The logits of all ranks. Padding follows the last row of the vocabulary."""
    if split.size == 1:
        return logits
    return torch.cat(split.gather(logits), dim=1)


def _padded_head(weight: Tensor, split: Split) -> Tensor:
    """The rows that vLLM pads an output head with; a product of another width might take another
    kernel. A part of a split head has them.
    """
    if split.size > 1:
        return weight
    missing = -len(weight) % ops.VOCAB_MULTIPLE
    return F.pad(weight, (0, 0, 0, missing)) if missing and weight.is_cuda else weight


def _chunks(packing: Packing, size: int) -> Iterator[tuple[int, Packing]]:
    """Split into runs of whole tiles of about `size` tokens; yields the first token of each, and
    its tiles as sequences.
    """
    pieces = [
        min(TILE, end - start)
        for begin, end in packing.spans()
        for start in range(begin, end, TILE)
    ]
    start, held = 0, list[int]()
    for piece in pieces:
        if held and sum(held) + piece > size:
            yield start, Packing(held, packing.device)
            start, held = start + sum(held), []
        held.append(piece)
    yield start, Packing(held, packing.device)


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    counts: Packing | None = None,
    chunk: int = 1024,
    temperature: float | Tensor = 1.0,
    total: Total | None = None,
    entropy_gradient: bool = False,
    split: Split | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See Operations.chosen_logprobs; logits in the model's dtype, then float32. Not given counts:
    one sequence.

    This does not wait for temperatures on a GPU. The packing of a batch refuses temperatures other
    than 1. Such a temperature that comes here anyway makes its token's logprob NaN.

    Raises:
        ValueError: a temperature other than 1, whose logprobs vLLM computes in another way.
    """
    check_temperature(temperature, targets)
    on_gpu = isinstance(temperature, Tensor) and temperature.is_cuda
    if not on_gpu and (other := _other_than_one(temperature)) is not None:
        raise ValueError(f"the invariant operations take temperature 1, not {other:g}")
    logprobs, entropy = _ChosenLogprobs.apply(
        hidden,
        weight,
        targets,
        counts or Packing([len(targets)], hidden.device),
        chunk,
        total,
        entropy_gradient,
        split or Split(),
        vocab_size or len(weight),
    )
    if on_gpu:
        logprobs = torch.where(torch.as_tensor(temperature) == 1, logprobs, torch.nan)
    return logprobs, entropy


def _other_than_one(temperature: float | Tensor) -> float | None:
    given = temperature.tolist() if isinstance(temperature, Tensor) else [temperature]
    return next((value for value in given if value != 1), None)
