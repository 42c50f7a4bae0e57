"""Each operation with gradients beside a float64 autograd of the textbook formula, for any packing, dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from example_trainer.models.ops import invariant as functions
from example_trainer.models.packing import Packing

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest relative error of a gradient, |ours - float64| / |float64| over the whole tensor, by the dtype of the inputs."""

Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Of a layer; the sequences come apart from it."""

    lengths: tuple[int, ...]
    hidden: int = 48
    inner: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 101

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Draws:
    """Random tensors in a dtype. They are drawn in float32 on the CPU, so that every device and dtype gets the same ones."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.generator = torch.Generator().manual_seed(seed)
        self.packing = Packing(sizes.lengths, device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype).to(self.device)

    def ids(self, count: int, *, bound: int | None = None) -> Tensor:
        return torch.randint(0, bound or self.sizes.vocab, (count,), generator=self.generator).to(self.device)

    def table(self) -> Tensor:
        exponents = torch.arange(0, self.sizes.head_dim, 2, dtype=torch.float64) / self.sizes.head_dim
        angles = torch.outer(torch.arange(self.packing.max_length, dtype=torch.float64), 10_000.0**-exponents)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.dtype).to(self.device)


@dataclass(frozen=True)
class Case:
    """What to differentiate: `ours` and the formula take the same tensors, of which the formula gets float64 copies."""

    inputs: dict[str, Tensor]
    ours: Callable[..., Outputs]
    formula: Callable[..., Outputs]


def linear_case(d: Draws) -> Case:
    s = d.sizes
    inputs = {"x": d.normal(s.tokens, s.hidden), "weight": d.normal(s.inner, s.hidden, scale=s.hidden**-0.5)}
    return Case(inputs, lambda x, weight: functions.linear(x, weight, packing=d.packing), lambda x, weight: x @ weight.T)


def biased_linear_case(d: Draws) -> Case:
    plain = linear_case(d)
    inputs = plain.inputs | {"bias": d.normal(d.sizes.inner)}
    return Case(inputs, lambda x, w, b: functions.linear(x, w, b, d.packing), lambda x, w, b: x @ w.T + b)


def matmul_case(d: Draws) -> Case:
    s = d.sizes
    inputs = {"a": d.normal(s.tokens, s.hidden), "b": d.normal(s.hidden, s.inner, scale=s.hidden**-0.5)}
    return Case(inputs, functions.matmul, lambda a, b: a @ b)


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rms_norm_case(d: Draws) -> Case:
    inputs = {"x": d.normal(d.sizes.tokens, d.sizes.hidden), "weight": 1 + d.normal(d.sizes.hidden, scale=0.3)}
    return Case(inputs, lambda x, w: functions.rms_norm(x, w, 1e-6, d.packing), _norm)


def head_norm_case(d: Draws) -> Case:
    """The heads of a slice of wider rows, as the norm of queries gets them."""
    s = d.sizes
    inputs = {"x": d.normal(s.tokens, (s.heads + 2) * s.head_dim), "weight": 1 + d.normal(s.head_dim, scale=0.3)}

    def heads(x: Tensor) -> Tensor:
        return x[:, : s.heads * s.head_dim].view(len(x), s.heads, s.head_dim)

    return Case(inputs, lambda x, w: functions.rms_norm(heads(x), w, 1e-6, d.packing), lambda x, w: _norm(heads(x), w))


def fused_norm_case(d: Draws) -> Case:
    s = d.sizes
    inputs = {"x": d.normal(s.tokens, s.hidden), "residual": d.normal(s.tokens, s.hidden), "weight": 1 + d.normal(s.hidden)}
    return Case(
        inputs,
        lambda x, r, w: functions.fused_add_rms_norm(x, r, w, 1e-6, d.packing),
        lambda x, r, w: (_norm(x + r, w), x + r),
    )


def silu_case(d: Draws) -> Case:
    inputs = {"x": d.normal(d.sizes.tokens, 2 * d.sizes.inner, scale=2.0)}

    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Case(inputs, functions.silu_and_mul, formula)


def rotary_case(d: Draws) -> Case:
    s = d.sizes
    inputs = {"q": d.normal(s.tokens, s.heads, s.head_dim), "k": d.normal(s.tokens, s.kv_heads, s.head_dim)}
    table, positions = d.table(), d.packing.positions

    def formula(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table.to(torch.float64)[positions][:, None].chunk(2, dim=-1)
        turn = torch.complex(cos, sin)

        def rotate(x: Tensor) -> Tensor:
            turned = torch.complex(*x.chunk(2, dim=-1)) * turn
            return torch.cat((turned.real, turned.imag), dim=-1)

        return rotate(q), rotate(k)

    return Case(inputs, lambda q, k: functions.rotary_embedding(positions, q, k, s.head_dim, table), formula)


def attention_formula(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-denominators of the softmax, by the definition."""
    group = q.shape[1] // k.shape[1]
    outs, denominators = [], []
    for rows, keys, values in zip(q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True):
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        denominators.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(denominators, dim=1)


def attention_case(d: Draws) -> Case:
    """Queries, keys and values as views on wider rows, as the merged projection gives them."""
    s, scale = d.sizes, d.sizes.head_dim**-0.5
    inputs = {"qkv": d.normal(s.tokens, (s.heads + 2 * s.kv_heads) * s.head_dim)}

    def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = qkv.split([s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim], dim=-1)
        q, k, v = (part.view(len(qkv), -1, s.head_dim) for part in parts)
        return q, k, v

    return Case(
        inputs,
        lambda qkv: functions.attention(*split(qkv), d.packing, scale),
        lambda qkv: attention_formula(*split(qkv), s.lengths, scale)[0],
    )


def embedding_case(d: Draws) -> Case:
    ids = d.ids(d.sizes.tokens, bound=max(2, d.sizes.vocab // 8))  # few ids: many repetitions
    inputs = {"weight": d.normal(d.sizes.vocab, d.sizes.hidden)}
    return Case(inputs, lambda weight: functions.embedding(ids, weight), lambda weight: F.embedding(ids, weight))


def chosen_logprobs_case(d: Draws) -> Case:
    s = d.sizes
    targets = d.ids(s.tokens)
    inputs = {"hidden": d.normal(s.tokens, s.hidden), "weight": d.normal(s.vocab, s.hidden, scale=2 * s.hidden**-0.5)}

    def formula(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None]).squeeze(1)

    return Case(inputs, lambda h, w: functions.chosen_logprobs(h, w, targets, d.packing, chunk=100)[0], formula)


CASES: dict[str, Callable[[Draws], Case]] = {
    "linear": linear_case,
    "linear with bias": biased_linear_case,
    "matmul": matmul_case,
    "rms_norm": rms_norm_case,
    "rms_norm of heads": head_norm_case,
    "fused_add_rms_norm": fused_norm_case,
    "silu_and_mul": silu_case,
    "rotary_embedding": rotary_case,
    "attention_varlen": attention_case,
    "embedding": embedding_case,
    "chosen_logprobs": chosen_logprobs_case,
}


def gradients(case: Case, seed: int, *, exact: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the gradient of each input for the same random gradients of the outputs.

    Args:
        exact: of the formula in float64, instead of ours.
    """
    leaves = [(t.double() if exact else t.clone()).requires_grad_() for t in case.inputs.values()]
    result = (case.formula if exact else case.ours)(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    dtype, generator = next(iter(case.inputs.values())).dtype, torch.Generator().manual_seed(seed)
    upstream = [torch.randn(out.shape, generator=generator).to(dtype).to(out.device).to(out.dtype) for out in outputs]
    torch.autograd.backward(outputs, upstream)
    found = {name: leaf.grad for name, leaf in zip(case.inputs, leaves, strict=True)}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, f"no gradient reached {missing}"
    return [out.detach() for out in outputs], {name: g for name, g in found.items() if g is not None}


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """|ours - exact| / |exact|; absolute where exact is 0."""
    norm = float(exact.norm())
    return float((ours.double() - exact).norm()) / (norm or 1.0)


def errors(name: str, sizes: Sizes, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, float]:
    """Relative error of each gradient of one operation."""
    case = CASES[name](Draws(sizes, dtype, device, seed))
    _, ours = gradients(case, seed + 1)
    _, exact = gradients(case, seed + 1, exact=True)
    return {f"d {key}": relative_error(ours[key], exact[key]) for key in ours}
