"""The fast table, for 16-bit weights on GPUs: cuBLAS, a library's attention, and our Triton kernels
for all between them.

The parts on which a plain decoder spends its time, and their treatment here (figures:
bench/trainer_speed.py):

    matrix products    as many as there are, none more; a weight's gradient is added to its float32 sum by the product itself
    norms, rotations   one kernel each way (`fast_kernels`), recomputed rather than kept where that is cheap
    attention          FlashAttention 4 as vLLM brings it (Hopper and later), else the
                       FlashAttention 2 that PyTorch has; both attend to shared prefixes
    output head        logits of a chunk of tokens in 16 bits, read once forward and once backward: no float32 table
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.models import head
from example_trainer.models.head import check_temperature
from example_trainer.models.ops import (
    fast_attention,
    fast_kernels,
    mixture,
    reference,
    triton_gradients,
    triton_heads,
)
from example_trainer.models.ops.mixture import route
from example_trainer.models.ops.reference import gelu_and_mul, rotary_table
from example_trainer.models.ops.triton_gradients import logit_gradient, silu_and_mul_gradient
from example_trainer.models.packing import Packing
from example_trainer.models.shards import Split, Total, add_product, summed

__all__ = [
    "NAME",
    "add_rms_norm",
    "attention",
    "chosen_logprobs",
    "embedding",
    "experts",
    "gelu_and_mul",
    "heads",
    "linear",
    "rms_norm",
    "rotary_table",
    "route",
    "rows",
    "silu_and_mul",
]
NAME = "fast"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        total: Total | None,
        bias_total: Total | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.totals = total, bias_total
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        total, bias_total = ctx.totals
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            if total is None:
                dw = dy.t() @ x
            else:
                add_product(total(), dy, x)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32)
            if bias_total is not None:
                bias_total().add_(db)
                db = None
        return dx, dw, None if db is None else db.to(dy.dtype), None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packing: Packing | None = None,
    total: Total | None = None,
    bias_total: Total | None = None,
) -> Tensor:
    """See Operations.linear."""
    y: Tensor = _Linear.apply(x, weight, bias, total, bias_total)
    return y


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


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        total: Total | None,
    ) -> Any:
        x = x.contiguous()
        y, added = fast_kernels.norm(x, residual, weight, eps)
        ctx.save_for_backward(added, weight)
        ctx.eps, ctx.total, ctx.fused = eps, total, residual is not None
        ctx.set_materialize_grads(False)
        return (y, added) if ctx.fused else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, extra = (*upstream, None)[:2]
        dw = None
        if dy is None:
            dx = extra
        else:
            dx, share = fast_kernels.norm_gradient(
                dy.contiguous(), x, weight, ctx.eps, None if extra is None else extra.contiguous()
            )
            if ctx.needs_input_grad[2]:
                if ctx.total is None:
                    dw = share.to(weight.dtype)
                else:
                    ctx.total().add_(share)
        return dx, dx if ctx.fused else None, dw, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    packing: Packing | None = None,
    total: Total | None = None,
) -> Tensor:
    """See Operations.rms_norm."""
    y: Tensor = _Norm.apply(x, None, weight, eps, total)
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
    y, added = _Norm.apply(x, residual, weight, eps, total)
    return y, added


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
        norms = None if q_weight is None or k_weight is None else (q_weight, k_weight)
        q, k = fast_kernels.heads(
            qkv, kv_heads, head_dim, norms, eps, packing.positions, rotary, interleaved
        )
        ctx.save_for_backward(qkv, q_weight, k_weight, rotary)
        ctx.eps, ctx.packing, ctx.totals, ctx.interleaved = eps, packing, totals, interleaved
        # The values stay where they are: attention reads them with the stride of qkv, which is kept
        # anyway.
        return q, k, qkv[:, -kv_heads * head_dim :].unflatten(1, (kv_heads, head_dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, rotary = ctx.saved_tensors
        norms = None if q_weight is None else (q_weight, k_weight)
        dqkv, shares = triton_heads.heads_gradient(
            dq, dk, dv, qkv, norms, ctx.eps, ctx.packing, rotary, ctx.interleaved
        )
        gradients: list[Tensor | None] = [None, None]
        for number, share in enumerate(() if shares is None else shares.sum((1, 2))):
            total = ctx.totals[number]
            if not ctx.needs_input_grad[1 + number]:
                continue
            if total is None:
                gradients[number] = share.to(qkv.dtype)
            else:
                total().add_(share)
        return dqkv, *gradients, None, None, None, None, None, None, None


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
    if norms is not None and len(norms[0]) != head_dim:
        qkv, norms = _normed_jointly(qkv, norms, eps, totals), None
    q_weight, k_weight = norms or (None, None)
    q, k, v = _Heads.apply(
        qkv,
        q_weight,
        k_weight,
        kv_heads,
        head_dim,
        eps,
        packing,
        rotary,
        totals,
        interleaved,
    )
    return q, k, v


def _normed_jointly(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    totals: tuple[Total | None, Total | None],
) -> Tensor:
    """qkv with queries normalised over all heads, and keys."""
    sizes = [len(norms[0]), len(norms[1])]
    q, k, v = qkv.split([*sizes, qkv.shape[1] - sum(sizes)], dim=-1)
    q, k = (
        rms_norm(part, weight, eps, total=total)
        for part, weight, total in zip((q, k), norms, totals, strict=True)
    )
    return torch.cat((q, k, v), dim=-1)


class _SeenKeys(torch.autograd.Function):
    """Keys and values of what each span sees; a prompt's are repeated for its responses, whose
    gradients add up in float32.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.tokens = len(k)
        return k.index_select(0, rows), v.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return *(_added_rows(part, rows, ctx.tokens) for part in upstream), None


def _added_rows(parts: Tensor, rows: Tensor, count: int) -> Tensor:
    total = torch.zeros((count, *parts.shape[1:]), dtype=torch.float32, device=parts.device)
    return total.index_add_(0, rows, parts.float()).to(parts.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None = None
) -> Tensor:
    """See Operations.attention."""
    rows = packing.key_rows
    if rows is not None:
        k, v = _SeenKeys.apply(k, v, rows)
    return fast_attention.attention(q, k, v, packing, scale, window)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return fast_kernels.silu_and_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return silu_and_mul_gradient(dy, x)


def silu_and_mul(x: Tensor) -> Tensor:
    """See Operations.silu_and_mul."""
    y: Tensor = _SiluAndMul.apply(x.contiguous())
    return y


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
    """See Operations.experts. By PyTorch's grouped product where it has a kernel: from Hopper on
    and for sizes that are multiples of 8. Elsewhere one expert comes after the other.
    """
    aligned = all(size % 8 == 0 for size in down.shape[1:])
    if torch.cuda.get_device_capability(x.device)[0] < 9 or not aligned:
        return reference.experts(x, weights, chosen, gate_up, down, packing, totals, split)
    begins = torch.tensor([0, len(x)]).pin_memory().to(x.device, non_blocking=True)
    kernels = mixture.Kernels(fast_kernels.silu_and_mul, triton_gradients)
    y = mixture.experts(x, weights, chosen, gate_up, down, begins, totals, kernels)
    return y if split is None else split.leave(y)


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
        if not ctx.needs_input_grad[1]:
            return None, None, None
        if ctx.total is not None:
            ctx.total().index_add_(0, ids, dy.float())
            return None, None, None
        return None, _added_rows(dy, ids, len(weight)), None


def embedding(ids: Tensor, weight: Tensor, total: Total | None = None) -> Tensor:
    """See Operations.embedding."""
    rows_: Tensor = _Embedding.apply(ids, weight, total)
    return rows_


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _added_rows(dy, rows, ctx.count), None


def rows(x: Tensor, rows: Tensor, packing: Packing | None = None) -> Tensor:
    """See Operations.rows."""
    chosen: Tensor = _Rows.apply(x, rows)
    return chosen


class _ChosenLogprobs(torch.autograd.Function):
    """Logits are made for `chunk` tokens at a time, in both directions, and never kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        inverse_temperature: float | Tensor,
        total: Total | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        columns = tuple(
            torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            figures = fast_kernels.softmax_figures(
                logits, targets[part], _at(inverse_temperature, part)
            )
            for column, figure in zip(columns, figures, strict=True):
                column[part] = figure
            del logits  # its memory is needed for the next chunk's
        logprobs, entropy, lses = columns
        ctx.chunk, ctx.inverse_temperature, ctx.total = chunk, inverse_temperature, total
        if entropy_gradient:
            ctx.save_for_backward(hidden, weight, targets, lses, entropy)
        else:
            ctx.save_for_backward(hidden, weight, targets, lses)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lses, *entropies = ctx.saved_tensors
        upstream, entropy_upstream = (one.contiguous() for one in arriving)
        gradient = torch.empty_like(hidden)
        trained = ctx.needs_input_grad[1]
        # A frozen output matrix (under adapters) gets no gradient: it would be the largest tensor
        # of the step.
        fresh = (
            torch.zeros_like(weight, dtype=torch.float32) if trained and ctx.total is None else None
        )
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = hidden[part] @ weight.t()
            entropy = (entropies[0][part], entropy_upstream[part]) if entropies else None
            inverse_temperature = _at(ctx.inverse_temperature, part)
            logit_gradient(
                logits, targets[part], lses[part], upstream[part], inverse_temperature, entropy
            )
            torch.mm(logits, weight, out=gradient[part])
            if trained:
                add_product(ctx.total() if fresh is None else fresh, logits, hidden[part])
            del logits  # its memory is needed for the next chunk's
        return (
            gradient,
            None if fresh is None else fresh.to(weight.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _at(inverse_temperature: float | Tensor, rows: slice) -> float | Tensor:
    return (
        inverse_temperature[rows]
        if isinstance(inverse_temperature, Tensor)
        else inverse_temperature
    )


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    counts: Packing | None,
    chunk: int,
    temperature: float | Tensor = 1.0,
    total: Total | None = None,
    entropy_gradient: bool = False,
    split: Split | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See Operations.chosen_logprobs. Ranks that split the rows exchange sums, never logits."""
    if split is not None and split.size > 1:
        return head.chosen_logprobs(
            hidden, weight, targets, counts, chunk, temperature, total, entropy_gradient, split,
            vocab_size,
        )  # fmt: skip
    check_temperature(temperature, targets)
    inverse = (
        temperature.float().reciprocal() if isinstance(temperature, Tensor) else 1.0 / temperature
    )
    logprobs, entropy = _ChosenLogprobs.apply(
        hidden, weight, targets, chunk, inverse, total, entropy_gradient
    )
    return logprobs, entropy
