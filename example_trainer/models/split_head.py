"""Logprobs of chosen tokens when every rank holds some rows of the output matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from example_trainer.models.split import Split


class _ChosenLogprobs(torch.autograd.Function):
    """As loss.chosen_logprobs, logits are made for `chunk` tokens at a time, in both directions, and never kept. Ranks exchange
    three numbers per token and direction-free maxima, never logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, first: int, split: Split, chunk: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, log_sum = torch.empty_like(logprobs), torch.empty_like(logprobs)
        inside, local = _place(targets, first, len(weight))
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ weight.t()).float().div_(temperature)
            top = logits.new_full((len(logits),), -torch.inf) if len(weight) == 0 else logits.amax(dim=-1)
            split.maximum(top)
            logits -= top[:, None]
            chosen = logits.new_zeros(len(logits))
            if len(weight):
                chosen = torch.where(inside[rows], logits.gather(1, local[rows, None]).squeeze(1), chosen)
            exponentials = logits.exp()
            sums = torch.stack((exponentials.sum(dim=-1), chosen, exponentials.mul_(logits).sum(dim=-1)))
            partition, chosen, weighted = split.total(sums)
            logprobs[rows] = chosen - partition.log()
            entropy[rows] = partition.log() - weighted / partition
            log_sum[rows] = top + partition.log()
            del logits, exponentials  # their memory is needed for the next chunk's
        ctx.save_for_backward(hidden, weight, targets, log_sum)
        ctx.first, ctx.split, ctx.chunk, ctx.temperature = first, split, chunk, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum = ctx.saved_tensors
        upstream = gradients[0] / ctx.temperature
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        inside, local = _place(targets, ctx.first, len(weight))
        for start in range(0, len(targets) if len(weight) else 0, ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            # d logprob / d logits = onehot(target) - softmax(logits)
            slope = (hidden[rows] @ weight.t()).float().div_(ctx.temperature).sub_(log_sum[rows, None]).exp_().neg_()
            slope.scatter_add_(1, local[rows, None], inside[rows, None].to(slope.dtype))
            slope = slope.mul_(upstream[rows, None]).to(weight.dtype)
            hidden_grad[rows] = slope @ weight
            if weight_grad is not None:
                weight_grad += slope.t() @ hidden[rows]
            del slope  # its memory is needed for the next chunk's logits
        ctx.split.total(hidden_grad)
        weight_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


def _place(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets this rank has a row for, and the row (0 for the others)."""
    inside = (targets >= first) & (targets < first + rows)
    return inside, torch.where(inside, targets - first, 0)


def split_chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    split: Split,
    chunk: int = 1024,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`loss.chosen_logprobs` over ranks, each with its rows of the output matrix. Collective.

    Args:
        hidden: [tokens, hidden], the same on every rank, with gradient, which comes back the same on every rank.
        weight: [rows, hidden] of this rank, padding included; its gradient is computed only if it requires one.
        targets: [tokens] int64 ids, the same on every rank.
        vocab_size: of the whole model.
        chunk, temperature: see loss.chosen_logprobs.

    Returns:
        The same on every rank: logprobs [tokens] float32, differentiable; entropy [tokens] float32 in nats, not so.
    """
    first, end = split.vocabulary_range(vocab_size)
    logprobs, entropy = _ChosenLogprobs.apply(hidden, weight[: end - first], targets, first, split, chunk, temperature)
    return logprobs, entropy
