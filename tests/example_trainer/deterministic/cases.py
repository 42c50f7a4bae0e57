"""Each operation of a table beside a float64 autograd of the textbook formula, for any packing,
dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from example_trainer.models.ops import Operations, invariant
from example_trainer.models.packing import NO_PARENT, Packing
from example_trainer.models.shards import Split

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest relative error of a gradient, |ours - float64| / |float64| over the whole tensor, by the
dtype of the inputs."""

PARAMETERS = ("weight", "bias", "q_norm", "k_norm", "gate_up", "down")
"""Inputs that are a model's parameters, whose gradients may go to totals."""

Outputs = Tensor | tuple[Tensor, ...]
Total = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Inputs of a layer; the sequences come apart from it."""

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
    """Random tensors in a dtype.

    They are drawn in float32 on the CPU, so that every device and dtype gets the same ones.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.generator = torch.Generator().manual_seed(seed)
        self.packing = Packing(sizes.lengths, device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype).to(self.device)

    def ids(self, count: int, *, bound: int | None = None) -> Tensor:
        return torch.randint(0, bound or self.sizes.vocab, (count,), generator=self.generator).to(
            self.device
        )

    def table(self) -> Tensor:
        exponents = (
            torch.arange(0, self.sizes.head_dim, 2, dtype=torch.float64) / self.sizes.head_dim
        )
        angles = torch.outer(
            torch.arange(self.packing.max_length, dtype=torch.float64), 10_000.0**-exponents
        )
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.dtype).to(self.device)


@dataclass(frozen=True)
class Case:
    """The functions to differentiate: `ours` and the formula take the same tensors; the formula
    gets float64 copies.

    Attributes:
        inputs: by name.
        ours: takes also the totals of some of PARAMETERS, as `weight_total` and so on.
    """

    inputs: dict[str, Tensor]
    ours: Callable[..., Outputs]
    formula: Callable[..., Outputs]


def linear_case(d: Draws, ops: Operations) -> Case:
    s = d.sizes
    inputs = {
        "x": d.normal(s.tokens, s.hidden),
        "weight": d.normal(s.inner, s.hidden, scale=s.hidden**-0.5),
    }

    def ours(x: Tensor, weight: Tensor, **totals: Total) -> Tensor:
        return ops.linear(x, weight, None, d.packing, totals.get("weight_total"))

    return Case(inputs, ours, lambda x, weight: x @ weight.T)


def biased_linear_case(d: Draws, ops: Operations) -> Case:
    inputs = linear_case(d, ops).inputs | {"bias": d.normal(d.sizes.inner)}

    def ours(x: Tensor, weight: Tensor, bias: Tensor, **totals: Total) -> Tensor:
        return ops.linear(
            x, weight, bias, d.packing, totals.get("weight_total"), totals.get("bias_total")
        )

    return Case(inputs, ours, lambda x, w, b: x @ w.T + b)


def row_linear_case(d: Draws, ops: Operations) -> Case:
    """A sum of two rounded parts. The formula knows no rounding."""
    inputs = biased_linear_case(d, ops).inputs

    def ours(x: Tensor, weight: Tensor, bias: Tensor, **totals: Total) -> Tensor:
        own_totals = totals.get("weight_total"), totals.get("bias_total")
        return ops.row_linear(x, weight, bias, Split(), 2, d.packing, *own_totals)

    return Case(inputs, ours, lambda x, w, b: x @ w.T + b)


def matmul_case(d: Draws, ops: Operations) -> Case:
    s = d.sizes
    inputs = {
        "a": d.normal(s.tokens, s.hidden),
        "b": d.normal(s.hidden, s.inner, scale=s.hidden**-0.5),
    }
    return Case(inputs, invariant.matmul, lambda a, b: a @ b)


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rms_norm_case(d: Draws, ops: Operations) -> Case:
    inputs = {
        "x": d.normal(d.sizes.tokens, d.sizes.hidden),
        "weight": 1 + d.normal(d.sizes.hidden, scale=0.3),
    }
    return Case(
        inputs,
        lambda x, w, **totals: ops.rms_norm(x, w, 1e-6, d.packing, totals.get("weight_total")),
        _norm,
    )


def head_norm_case(d: Draws, ops: Operations) -> Case:
    """The heads of a slice of wider rows, as the norm of queries gets them."""
    s = d.sizes
    inputs = {
        "x": d.normal(s.tokens, (s.heads + 2) * s.head_dim),
        "weight": 1 + d.normal(s.head_dim, scale=0.3),
    }

    def heads(x: Tensor) -> Tensor:
        return x[:, : s.heads * s.head_dim].view(len(x), s.heads, s.head_dim)

    return Case(
        inputs,
        lambda x, w: invariant.rms_norm(heads(x), w, 1e-6, d.packing),
        lambda x, w: _norm(heads(x), w),
    )


def fused_norm_case(d: Draws, ops: Operations) -> Case:
    s = d.sizes
    inputs = {
        "x": d.normal(s.tokens, s.hidden),
        "residual": d.normal(s.tokens, s.hidden),
        "weight": 1 + d.normal(s.hidden),
    }
    return Case(
        inputs,
        lambda x, r, w, **totals: ops.add_rms_norm(
            x, r, w, 1e-6, d.packing, totals.get("weight_total")
        ),
        lambda x, r, w: (_norm(x + r, w), x + r),
    )


def silu_case(d: Draws, ops: Operations) -> Case:
    inputs = {"x": d.normal(d.sizes.tokens, 2 * d.sizes.inner, scale=2.0)}

    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Case(inputs, ops.silu_and_mul, formula)


def _rotated(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table.to(torch.float64)[positions][:, None].chunk(2, dim=-1)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


def rotary_case(d: Draws, ops: Operations) -> Case:
    s = d.sizes
    inputs = {
        "q": d.normal(s.tokens, s.heads, s.head_dim),
        "k": d.normal(s.tokens, s.kv_heads, s.head_dim),
    }
    table, positions = d.table(), d.packing.positions
    return Case(
        inputs,
        lambda q, k: invariant.rotary_embedding(positions, q, k, s.head_dim, table),
        lambda q, k: (_rotated(q, table, positions), _rotated(k, table, positions)),
    )


def _split_heads(qkv: Tensor, s: Sizes) -> list[Tensor]:
    parts = qkv.split(
        [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim], dim=-1
    )
    return [part.view(len(qkv), -1, s.head_dim) for part in parts]


def heads_case(d: Draws, ops: Operations) -> Case:
    """Queries, keys and values of the merged projection: split, normalised, rotated."""
    s, table = d.sizes, d.table()
    inputs = {
        "qkv": d.normal(s.tokens, (s.heads + 2 * s.kv_heads) * s.head_dim),
        "q_norm": 1 + d.normal(s.head_dim, scale=0.3),
        "k_norm": 1 + d.normal(s.head_dim, scale=0.3),
    }

    def ours(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, **totals: Total) -> Outputs:
        given = totals.get("q_norm_total"), totals.get("k_norm_total")
        return ops.heads(
            qkv, s.kv_heads, s.head_dim, (q_norm, k_norm), 1e-6, d.packing, table, given
        )

    def formula(qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Outputs:
        q, k, v = _split_heads(qkv, s)
        positions = d.packing.positions
        return (
            _rotated(_norm(q, q_norm), table, positions),
            _rotated(_norm(k, k_norm), table, positions),
            v,
        )

    return Case(inputs, ours, formula)


def shared_spans(lengths: Sequence[int], device: str) -> Packing:
    """Pack spans in trees of four: the second and the fourth span continue the first, and the third
    continues the second.
    """
    parents = [
        (NO_PARENT, number - 1, number - 1, number - 3)[number % 4]
        for number in range(len(lengths))
    ]
    return Packing(lengths, device, parents)


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-denominators of the softmax, by the definition."""
    group = q.shape[1] // k.shape[1]
    outs, denominators = [], []
    for rows, seen in zip(q.split(packing.lengths), packing.rows_seen, strict=True):
        keys, values = (part[seen].repeat_interleave(group, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        mask = mask.triu(1 + len(seen) - len(rows))
        scores = scores.masked_fill(mask, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        denominators.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(denominators, dim=1)


def attention_case(d: Draws, ops: Operations, shared: bool = False) -> Case:
    """Queries, keys and values as views on wider rows, as the merged projection gives them."""
    s, scale = d.sizes, d.sizes.head_dim**-0.5
    packing = shared_spans(s.lengths, d.device) if shared else d.packing
    inputs = {"qkv": d.normal(s.tokens, (s.heads + 2 * s.kv_heads) * s.head_dim)}

    def formula(qkv: Tensor) -> Tensor:
        q, k, v = _split_heads(qkv, s)
        return attention_formula(q, k, v, packing, scale)[0]

    def ours(qkv: Tensor) -> Tensor:
        q, k, v = _split_heads(qkv, s)
        return ops.attention(q, k, v, packing, scale)

    return Case(inputs, ours, formula)


def rows_case(d: Draws, ops: Operations) -> Case:
    """Rows of shared spans; some are chosen several times."""
    packing = shared_spans([d.sizes.tokens, 1], d.device)
    chosen = d.ids(2 * packing.tokens, bound=packing.tokens)
    inputs = {"x": d.normal(packing.tokens, d.sizes.hidden)}
    return Case(inputs, lambda x: ops.rows(x, chosen, packing), lambda x: x[chosen])


def embedding_case(d: Draws, ops: Operations) -> Case:
    ids = d.ids(d.sizes.tokens, bound=max(2, d.sizes.vocab // 8))  # few ids: many repetitions
    inputs = {"weight": d.normal(d.sizes.vocab, d.sizes.hidden)}
    return Case(
        inputs,
        lambda weight, **totals: ops.embedding(ids, weight, totals.get("weight_total")),
        lambda weight: F.embedding(ids, weight),
    )


def chosen_logprobs_case(d: Draws, ops: Operations) -> Case:
    s = d.sizes
    targets = d.ids(s.tokens)
    inputs = {
        "hidden": d.normal(s.tokens, s.hidden),
        "weight": d.normal(s.vocab, s.hidden, scale=2 * s.hidden**-0.5),
    }

    def ours(hidden: Tensor, weight: Tensor, **totals: Total) -> Tensor:
        return ops.chosen_logprobs(
            hidden, weight, targets, d.packing, 100, 1.0, totals.get("weight_total")
        )[0]

    def formula(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None]).squeeze(1)

    return Case(inputs, ours, formula)


def entropy_case(d: Draws, ops: Operations) -> Case:
    """Logprobs and entropies that both have gradients, each row at its own temperature (vLLM's bits
    are defined for 1 alone).
    """
    s = d.sizes
    targets, inputs = d.ids(s.tokens), chosen_logprobs_case(d, ops).inputs
    temperatures = 0.8 + torch.rand(s.tokens, generator=d.generator).to(d.device)
    if ops is invariant:
        temperatures.fill_(1)

    def ours(hidden: Tensor, weight: Tensor, **totals: Total) -> Outputs:
        return ops.chosen_logprobs(
            hidden,
            weight,
            targets,
            d.packing,
            70,
            temperatures,
            totals.get("weight_total"),
            entropy_gradient=True,
        )

    def formula(hidden: Tensor, weight: Tensor) -> Outputs:
        table = F.log_softmax(hidden @ weight.T / temperatures[:, None], dim=-1)
        return table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)

    return Case(inputs, ours, formula)


EXPERTS, CHOICES = 5, 3


def route_case(d: Draws, ops: Operations, renormalised: bool) -> Case:
    inputs = {"logits": d.normal(d.sizes.tokens, EXPERTS, scale=2.0)}
    # Equal logits are chosen from by number.
    inputs["logits"][:, 3] = inputs["logits"][:, 1]

    def formula(logits: Tensor) -> Tensor:
        ranked = logits.detach().sort(dim=-1, descending=True, stable=True).indices
        weights = logits.softmax(-1).gather(1, ranked[:, :CHOICES])
        return weights / weights.sum(-1, keepdim=True) if renormalised else weights

    def ours(logits: Tensor) -> Tensor:
        weights, chosen = ops.route(logits, CHOICES, renormalised)
        again, same = ops.route(logits, CHOICES, renormalised, chosen=chosen)
        assert torch.equal(same, chosen)
        assert relative_error(again, weights.detach().double()) < 1e-6
        return (weights + again) / 2

    return Case(inputs, ours, formula)


def experts_case(d: Draws, ops: Operations, parts: int = 1) -> Case:
    s = d.sizes
    wide = torch.promote_types(d.dtype, torch.float32)
    inputs = {
        "x": d.normal(s.tokens, s.hidden),
        "weights": d.normal(s.tokens, CHOICES).to(wide),
        "gate_up": d.normal(EXPERTS, 2 * s.inner, s.hidden, scale=s.hidden**-0.5),
        "down": d.normal(EXPERTS, s.hidden, s.inner, scale=s.inner**-0.5),
    }
    # The last expert is chosen by no token.
    ranks = torch.rand(s.tokens, EXPERTS - 1, generator=d.generator).argsort()
    chosen = ranks[:, :CHOICES].to(d.device)

    def ours(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, **totals: Total) -> Tensor:
        own_totals = totals.get("gate_up_total"), totals.get("down_total")
        return ops.experts(x, weights, chosen, gate_up, down, d.packing, own_totals, parts=parts)

    def formula(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = torch.einsum("eoh,th->teo", gate_up, x).chunk(2, dim=-1)
        outputs = torch.einsum("ehi,tei->teh", down, F.silu(gate) * up)
        rows = torch.arange(len(x), device=x.device)[:, None]
        return (outputs[rows, chosen] * weights[:, :, None]).sum(1)

    return Case(inputs, ours, formula)


CASES: dict[str, Callable[[Draws, Operations], Case]] = {
    "route": partial(route_case, renormalised=False),
    "route renormalised": partial(route_case, renormalised=True),
    "experts": experts_case,
    "linear": linear_case,
    "row_linear": row_linear_case,
    "linear with bias": biased_linear_case,
    "rms_norm": rms_norm_case,
    "add_rms_norm": fused_norm_case,
    "heads": heads_case,
    "silu_and_mul": silu_case,
    "attention": attention_case,
    "attention of shared spans": partial(attention_case, shared=True),
    "rows": rows_case,
    "embedding": embedding_case,
    "chosen_logprobs": chosen_logprobs_case,
    "chosen_logprobs with entropy": entropy_case,
}
"""Operations of every table."""
INVARIANT_CASES = CASES | {
    "matmul": matmul_case,
    "experts of two parts": partial(experts_case, parts=2),
    "rms_norm of heads": head_norm_case,
    "rotary_embedding": rotary_case,
}
"""And what the invariant one offers to models that are put together elsewhere."""


def gradients(
    case: Case, seed: int, *, exact: bool = False, totals: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the gradient of each input for the same random gradients of the outputs.

    Args:
        exact: of the formula in float64, instead of ours.
        totals: add the gradients of weights to totals, into which 1 was put before.
    """
    leaves = {
        name: (t.double() if exact else t.clone()).requires_grad_()
        for name, t in case.inputs.items()
    }
    wide = (
        torch.float64 if next(iter(case.inputs.values())).dtype == torch.float64 else torch.float32
    )
    sums = {
        name: torch.ones_like(t, dtype=wide)
        for name, t in case.inputs.items()
        if totals and name in PARAMETERS
    }
    result = (case.formula if exact else case.ours)(
        *leaves.values(), **{f"{name}_total": partial(sums.get, name) for name in sums}
    )
    outputs = [result] if isinstance(result, Tensor) else list(result)
    dtype, generator = next(iter(case.inputs.values())).dtype, torch.Generator().manual_seed(seed)
    upstream = [
        torch.randn(out.shape, generator=generator).to(dtype).to(out.device).to(out.dtype)
        for out in outputs
    ]
    torch.autograd.backward(outputs, upstream)
    assert all(leaves[name].grad is None for name in sums), (
        "a gradient with a total went to autograd"
    )
    found = {name: sums[name] - 1 if name in sums else leaf.grad for name, leaf in leaves.items()}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, f"no gradient reached {missing}"
    return [out.detach() for out in outputs], {
        name: g for name, g in found.items() if g is not None
    }


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """|ours - exact| / |exact|; absolute where exact is 0."""
    norm = float(exact.norm())
    return float((ours.double() - exact).norm()) / (norm or 1.0)


def errors(
    name: str,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    ops: Operations = invariant,
    totals: bool = False,
) -> dict[str, float]:
    """Relative error of each output and each gradient of one operation of a table."""
    case = INVARIANT_CASES[name](Draws(sizes, dtype, device, seed), ops)
    outputs, ours = gradients(case, seed + 1, totals=totals)
    formula, exact = gradients(case, seed + 1, exact=True)
    found = {
        f"output {i}": relative_error(a, b)
        for i, (a, b) in enumerate(zip(outputs, formula, strict=True))
    }
    return found | {f"d {key}": relative_error(ours[key], exact[key]) for key in ours}
