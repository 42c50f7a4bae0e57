"""Checks of a mixture's operations in deterministic mode at the sizes of a real layer, for
check_deterministic_trainer.py: its router, its experts and their gradients.

On a GPU the operations are the ones that vLLM and the trainer both call. They are PyTorch's grouped
product, and Triton kernels of this project for the choice and the sum over slots. On a CPU, where
the tests try the checks, the reference runs.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from example_trainer.models.ops import invariant
from example_trainer.models.packing import Packing
from tests.example_trainer.deterministic.cases import LIMITS, relative_error
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.bits import random_rows, same_bits
from vllm_patching.batch_invariant.experts_test import routings

Result = tuple[bool, Any]
"""The verdict of a check, and its observation."""
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 65, 127, 128, 129, 255, 256, 257, 512, 777, 1024, 2048)
"""Tokens of a batch; with eight experts for each, 16 of them fill a tile of 128 rows."""
STARTS = (0, 333)
TIMED_ROWS = (1, 32, 256, 2048, 16384)
ROUTINGS = ("evenly", "unevenly", "all on the same experts", "by ties")


@dataclass(frozen=True)
class Layer:
    """A layer's sizes, and where it is. The defaults are the sizes of Qwen3-30B-A3B.

    Attributes:
        tokens: of the largest batch.
    """

    experts: int = 128
    chosen: int = 8
    hidden: int = 2048
    inner: int = 768
    tokens: int = 2048
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def batches(self) -> Iterator[slice]:
        """Parts of the largest batch."""
        for rows in ROWS:
            yield from (
                slice(start, start + rows) for start in STARTS if start + rows <= self.tokens
            )

    @property
    def x(self) -> Tensor:
        """[tokens, hidden]."""
        like = torch.empty(0, device=self.device, dtype=self.dtype)
        return random_rows(self.tokens, self.hidden, like=like, seed=1)

    def logits(self, routing: str, tokens: int = 0) -> Tensor:
        """[tokens, experts] of one of `ROUTINGS`."""
        like = torch.empty(0, device=self.device, dtype=self.dtype)
        return routings(tokens or self.tokens, self.experts, like)[routing]

    def routed(self, routing: str, tokens: int = 0) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts."""
        return ops.route(self.logits(routing, tokens), self.chosen, True)


@cache
def matrices(layer: Layer) -> tuple[Tensor, Tensor]:
    """The experts' two matrices, stacked."""
    like = torch.empty(0, device=layer.device, dtype=layer.dtype)
    w13 = random_rows(layer.experts, 2 * layer.inner, layer.hidden, like=like, seed=2)
    w2 = random_rows(layer.experts, layer.hidden, layer.inner, like=like, seed=3)
    return w13.mul_(layer.hidden**-0.5), w2.mul_(layer.inner**-0.5)


def choices(layer: Layer, routing: str) -> Result:
    """A token's weights and experts do not depend on the batch, and equal logits go to the lowest
    numbers.
    """
    logits = layer.logits(routing)
    weights, chosen = ops.route(logits, layer.chosen, True)
    wrong = []
    for rows in layer.batches:
        own_weights, own = ops.route(logits[rows], layer.chosen, True)
        if not (same_bits(own_weights, weights[rows]) and torch.equal(own, chosen[rows])):
            wrong.append(_length(rows))
    expected = logits.double().softmax(-1).gather(1, chosen)
    error = relative_error(weights, expected / expected.sum(-1, keepdim=True))
    lowest = torch.arange(layer.chosen, device=chosen.device).expand_as(chosen)
    ties = routing != "by ties" or torch.equal(chosen, lowest)
    return not wrong and ties and error < 1e-5, f"{_told(wrong)}, {error:.1e}, ties {ties}"


def outputs(layer: Layer, routing: str, parts: int = 1) -> Result:
    """The experts' output of a token has the same bits in each batch."""
    x, (w13, w2), (weights, chosen) = layer.x, matrices(layer), layer.routed(routing)
    whole = ops.experts(x, weights, chosen, w13, w2, parts)
    wrong = [
        _length(rows)
        for rows in layer.batches
        if not same_bits(
            ops.experts(x[rows], weights[rows], chosen[rows], w13, w2, parts), whole[rows]
        )
    ]
    error = relative_error(whole[:16], formula(layer, slice(0, 16), routing))
    busiest = int(chosen.flatten().bincount().max())
    told = f"{_told(wrong)}, {error:.1e} from float64, {busiest} tokens at the busiest expert"
    return not wrong and error <= LIMITS[layer.dtype], told


def formula(layer: Layer, rows: slice, routing: str) -> Tensor:
    """The experts' outputs of some tokens in float64."""
    x, (w13, w2), (weights, chosen) = layer.x[rows], matrices(layer), layer.routed(routing)
    found = []
    for token, own, numbers in zip(x.double(), weights[rows], chosen[rows].tolist(), strict=True):
        slots = torch.zeros_like(token)
        for weight, number in zip(own.double(), numbers, strict=True):
            gate, up = (w13[number].double() @ token).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            slots += weight * (w2[number].double() @ inner)
        found.append(slots)
    return torch.stack(found)


def products(layer: Layer, routing: str) -> Result:
    """The grouped product gives a row the same bits in each batch, in both directions; the sum over
    slots is left out.
    """
    (_, chosen), wrong = layer.routed(routing), dict[str, list[int]]()
    for name, weight in zip(("up", "down"), matrices(layer), strict=True):
        for direction, matrix in (("", weight), (" backward", weight.transpose(1, 2))):
            like = torch.empty(0, device=layer.device, dtype=layer.dtype)
            x = random_rows(layer.tokens, matrix.shape[2], like=like, seed=4)
            whole = _slots(x, chosen, matrix)
            wrong[name + direction] = [
                _length(rows)
                for rows in layer.batches
                if not same_bits(_slots(x[rows], chosen[rows], matrix), _part(whole, rows, layer))
            ]
    differing = {name: rows for name, rows in wrong.items() if rows}
    return not differing, f"batches that differ: {differing}" if differing else "4 products"


def _slots(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    assigned = ops.assign(chosen, len(weight))
    return ops.expert_linear(x, weight, assigned.ends, assigned.tokens)[assigned.places]


def _part(slots: Tensor, rows: slice, layer: Layer) -> Tensor:
    return slots[rows.start * layer.chosen : rows.stop * layer.chosen]


def gradients(layer: Layer, routing: str) -> Result:
    """Gradients of tokens do not depend on the batch. Gradients of the matrices do not depend on
    the bins that a step's tokens are packed in.
    """
    whole = _gradients(layer, routing, [layer.tokens])
    cut = layer.tokens // 3 + 1
    others = _gradients(layer, routing, [cut, layer.tokens - cut])
    again = _gradients(layer, routing, [layer.tokens])
    names = ("tokens", "weights", "gate and up", "down")
    differing = [
        name
        for number, name in enumerate(names)
        if not same_bits(whole[number], others[number])
        or not same_bits(whole[number], again[number])
    ]
    return not differing, f"differing: {', '.join(differing) or 'nothing'}"


def _gradients(layer: Layer, routing: str, lengths: list[int]) -> list[Tensor]:
    """Return the gradients of all tokens in bins of these lengths, which have the same spans."""
    (w13, w2), (weights, chosen) = matrices(layer), layer.routed(routing)
    leaves = [w13.detach().requires_grad_(), w2.detach().requires_grad_()]
    sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves]
    totals: Any = tuple(partial(_same, total) for total in sums)
    like = torch.empty(0, device=layer.device, dtype=layer.dtype)
    dy = random_rows(layer.tokens, layer.hidden, like=like, seed=5)
    cut, start, found = layer.tokens // 3 + 1, 0, list[tuple[Tensor, Tensor]]()
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        x = layer.x[rows].requires_grad_()
        own = weights[rows].detach().clone().requires_grad_()
        spans = [cut, layer.tokens - cut] if length == layer.tokens else [length]
        packing = Packing(spans, layer.device)
        y = invariant.experts(x, own, chosen[rows], *leaves, packing, totals)
        y.backward(dy[rows])
        assert x.grad is not None
        assert own.grad is not None
        found.append((x.grad, own.grad))
    return [*(torch.cat(parts) for parts in zip(*found, strict=True)), *sums]


def _same(total: Tensor) -> Tensor:
    return total


def speed(layer: Layer, timed: tuple[int, ...] = TIMED_ROWS) -> Result:
    """Milliseconds of the experts for so many tokens, beside the bare grouped product over rows
    that are sorted already.
    """
    found: dict[str, dict[str, float]] = {}
    w13, w2 = matrices(layer)
    for tokens in timed:
        x, weights, chosen = _asked(layer, tokens)
        assigned = ops.assign(chosen, layer.experts)
        rows = x.index_select(0, assigned.tokens)
        inner = random_rows(len(rows), layer.inner, like=x, seed=7)
        ways: dict[str, Callable[[], Any]] = {
            "experts": partial(ops.experts, x, weights, chosen, w13, w2),
            "router": partial(ops.route, layer.logits("evenly", tokens), layer.chosen, True),
            "grouped product, up": partial(ops.expert_linear, rows, w13, assigned.ends),
            "grouped product, down": partial(ops.expert_linear, inner, w2, assigned.ends),
        }
        found[f"{tokens} tokens"] = {
            name: round(milliseconds(work, layer.device), 4) for name, work in ways.items()
        }
    return True, found


def speed_of_vllm(layer: Layer) -> Result:
    """Milliseconds of vLLM's ordinary experts for the same tokens."""
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    found, (w13, w2) = dict[str, float](), matrices(layer)
    for tokens in TIMED_ROWS:
        x, weights, chosen = _asked(layer, tokens)
        work = partial(module.fused_experts, x, w13, w2, weights, chosen.int())
        found[f"{tokens} tokens"] = round(milliseconds(work, layer.device), 4)
    return True, found


def _asked(layer: Layer, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = random_rows(tokens, layer.hidden, like=matrices(layer)[0], seed=6)
    return x, *layer.routed("evenly", tokens)


def milliseconds(work: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Return the median milliseconds of a call, after two to warm up."""
    wait = partial(torch.cuda.synchronize, device) if device != "cpu" else int
    found = []
    for number in range(repeats + 2):
        wait()
        began = time.perf_counter()
        work()
        wait()
        if number > 1:
            found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _told(wrong: list[int]) -> str:
    if wrong:
        return f"depends on the batch at {sorted(set(wrong))} tokens"
    return f"{len(ROWS)} batch sizes"


def mixture_checks(layer: Layer) -> dict[str, Callable[[], Result]]:
    """All of them, by name."""
    found: dict[str, Callable[[], Result]] = {}
    for routing in ROUTINGS:
        found[f"mixture: router, {routing}"] = partial(choices, layer, routing)
        found[f"mixture: grouped products, {routing}"] = partial(products, layer, routing)
        found[f"mixture: experts, {routing}"] = partial(outputs, layer, routing)
        found[f"mixture: gradients, {routing}"] = partial(gradients, layer, routing)
    for parts in (2, 4):
        found[f"mixture: experts in {parts} parts"] = partial(outputs, layer, "unevenly", parts)
    found["mixture: milliseconds"] = partial(speed, layer)
    found["mixture: milliseconds of vLLM's own experts"] = partial(speed_of_vllm, layer)
    return found
