"""The output head in plain torch: logprobs of chosen tokens without keeping logits, whole or split
over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.models.packing import Packing
from example_trainer.models.shards import Split, Total, add_product, deliver, wide


def default_chunk(device: torch.device) -> int:
    """Tokens whose logits exist at the same time, unless another number is given.

    Few on a CPU, where they are tables in float32. On a GPU enough that going over the sum of the
    output matrix's gradient, once for each chunk, hardly counts.
    """
    return 4096 if device.type == "cuda" else 1024


def check_temperature(temperature: float | Tensor, targets: Tensor) -> None:
    """Raise ValueError unless it is a number, or has one for each target: broadcasting would take
    anything.
    """
    if isinstance(temperature, Tensor) and temperature.shape != targets.shape:
        raise ValueError(
            f"temperatures of shape {list(temperature.shape)} for {len(targets)} targets: give each target its own"
        )


class _ChosenLogprobs(torch.autograd.Function):
    """Logits are made for `chunk` tokens at a time, in both directions, and never kept. Ranks
    exchange a maximum and three numbers per token, never logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        span: tuple[int, int],
        split: Split,
        chunk: int,
        temperature: float | Tensor,
        total: Total | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = wide(hidden.new_empty(len(targets)))
        entropy, log_sum = torch.empty_like(logprobs), torch.empty_like(logprobs)
        ctx.span, ctx.split, ctx.chunk, ctx.temperature, ctx.total = (
            span,
            split,
            chunk,
            temperature,
            total,
        )
        held = weight[: span[1] - span[0]]
        inside, local = _place(targets, *span)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = wide(hidden[rows] @ held.t()).div_(_at(temperature, rows))
            top = logits.amax(dim=-1) if len(held) else logits.new_full((len(logits),), -torch.inf)
            split.maximum(top)
            logits -= top[:, None]
            chosen = logits.new_zeros(len(logits))
            if len(held):
                chosen = torch.where(
                    inside[rows], logits.gather(1, local[rows, None]).squeeze(1), chosen
                )
            exponentials = logits.exp()
            sums = torch.stack(
                (exponentials.sum(dim=-1), chosen, exponentials.mul_(logits).sum(dim=-1))
            )
            partition, chosen, weighted = split.total(sums)
            logprobs[rows] = chosen - partition.log()
            entropy[rows] = partition.log() - weighted / partition
            log_sum[rows] = top + partition.log()
            del logits, exponentials  # their memory is needed for the next chunk's
        if entropy_gradient:
            ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        else:
            ctx.save_for_backward(hidden, weight, targets, log_sum)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden)
        # A frozen output matrix (under adapters) gets none: it would be the largest tensor of the
        # step.
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = deliver(
                weight, ctx.total, lambda total: _gradients(ctx, upstream, hidden_grad, total)
            )
        else:
            _gradients(ctx, upstream, hidden_grad, None)
        return ctx.split.total(hidden_grad), weight_grad, None, None, None, None, None, None, None


def _gradients(
    ctx: Any, upstream: tuple[Tensor, ...], hidden_grad: Tensor, weight_total: Tensor | None
) -> None:
    """Fill the gradient of the hidden states, and add the weight's to its total."""
    hidden, weight, targets, log_sum, *entropies = ctx.saved_tensors
    held = weight[: ctx.span[1] - ctx.span[0]]
    inside, local = _place(targets, *ctx.span)
    for start in range(0, len(targets) if len(held) else 0, ctx.chunk):
        rows = slice(start, start + ctx.chunk)
        temperature, arriving = _at(ctx.temperature, rows), upstream[0][rows, None]
        slope = wide(hidden[rows] @ held.t()).div_(temperature).sub_(log_sum[rows, None])
        if entropies:
            # d entropy / d logits = -softmax(logits) · (log softmax(logits) + entropy), beside that
            # of the logprob
            chances = slope.exp()
            slope = (
                slope.add_(entropies[0][rows, None])
                .mul_(upstream[1][rows, None])
                .add_(arriving)
                .mul_(chances.neg_())
            )
            del chances
            slope.scatter_add_(1, local[rows, None], arriving * inside[rows, None])
            slope = slope.div_(temperature).to(weight.dtype)
        else:
            # d logprob / d logits = onehot(target) - softmax(logits)
            slope = slope.exp_().neg_()
            slope.scatter_add_(1, local[rows, None], inside[rows, None].to(slope.dtype))
            slope = slope.mul_(arriving / temperature).to(weight.dtype)
        hidden_grad[rows] = slope @ held
        if weight_total is not None:
            add_product(weight_total[: len(held)], slope, hidden[rows])
        del slope  # its memory is needed for the next chunk's logits


def _at(temperature: float | Tensor, rows: slice) -> float | Tensor:
    """Return the divisor of the logits of some rows: one number, or a column."""
    return temperature[rows, None] if isinstance(temperature, Tensor) else temperature


def _place(targets: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Which targets this rank has a row for, and the row (0 for the others)."""
    inside = (targets >= first) & (targets < end)
    return inside, torch.where(inside, targets - first, 0)


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
    """See Operations.chosen_logprobs; float64 for float64.

    Two float32 tables of `chunk` × vocab exist at a time, at most; the backward pass makes the
    logits again.

    Args:
        hidden: the same on every rank, and so is its gradient.
        weight: its gradient is computed only if it requires one.
        counts: not used: a chunk has exactly `chunk` targets, whichever sequences they are of.
    """
    check_temperature(temperature, targets)
    split = split or Split()
    held = split.vocabulary_range(len(weight) if vocab_size is None else vocab_size)
    logprobs, entropy = _ChosenLogprobs.apply(
        hidden, weight, targets, held, split, chunk, temperature, total, entropy_gradient
    )
    return logprobs, entropy
