"""Checks of a backward pass of attention, for check_deterministic_trainer.py: FlashAttention 4's
deterministic kernel, which the trainer takes.

A backward pass that gives a sequence other bits in a bin than alone cannot be the trainer's. Our
forward pass, of each sequence alone, gives the outputs and denominators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from example_trainer.models.ops import flash_attention_4
from example_trainer.models.packing import Packing
from tests.example_trainer.deterministic.cases import LIMITS, attention_formula, relative_error
from vllm_patching.batch_invariant import ops

Result = tuple[bool, str]
"""The verdict of a check, and its observation."""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
WIDTHS = (64, 128)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 512, 1000, 1024, 2049, 4096, 8192)
COMPARED = (1, 64, 65, 300, 1024, 2049)
"""Lengths of sequences whose gradients are held against float64."""
NEIGHBOURS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), (5, 300)),
    ((77,), (1,)),
    ((300, 64), ()),
    ((8192,), (1, 513)),
    ((1,) * 200, (3,) * 100),
)
"""Lengths before and behind the compared sequence. The library looks up sequences in another way
when there are more than 256."""
TIMES = 3


@dataclass(frozen=True)
class Heads:
    """Heads of a layer, and where the tensors are."""

    width: int
    heads: int = 4
    kv_heads: int = 2
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.width**-0.5


@dataclass(frozen=True)
class Drawn:
    """One sequence: the upstream gradient, q, k, v, out and lse, in the order of the arguments."""

    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(heads: Heads, length: int, seed: int) -> Drawn:
        """Draw one and forward it alone."""
        generator = torch.Generator().manual_seed(1000003 * seed + length)
        upstream, q, k, v = (
            torch.randn(length, count, heads.width, generator=generator)
            .to(heads.dtype)
            .to(heads.device)
            for count in (heads.heads, heads.heads, heads.kv_heads, heads.kv_heads)
        )
        packing = Packing([length], heads.device)
        out, lse = ops.attention_varlen(q, k, v, packing.cu_seqlens, length, heads.scale)
        return Drawn((upstream, q, k, v, out, lse))


def gradients(backward: Backward, heads: Heads, sequences: Sequence[Drawn]) -> tuple[Tensor, ...]:
    """dq, dk and dv of sequences in one bin."""
    *tokens, lse = zip(*(one.tensors for one in sequences), strict=True)
    packed = [torch.cat(parts) for parts in tokens]
    packing = Packing([len(one.tensors[0]) for one in sequences], heads.device)
    return backward(*packed, torch.cat(lse, dim=1), packing, heads.scale)


def close_to_float64(backward: Backward, heads: Heads, lengths: Sequence[int]) -> Result:
    """The gradients of a bin against autograd's, of the formula in float64."""
    drawn = [Drawn.of(heads, length, seed=1) for length in lengths]
    ours = gradients(backward, heads, drawn)
    expected: list[list[Tensor]] = [[], [], []]
    for one in drawn:
        upstream, q, k, v = (part.double() for part in one.tensors[:4])
        leaves = [part.requires_grad_() for part in (q, k, v)]
        out, _ = attention_formula(*leaves, Packing([len(q)], heads.device), heads.scale)
        for found, gradient in zip(
            expected, torch.autograd.grad(out, leaves, upstream), strict=True
        ):
            found.append(gradient)
    errors = {
        name: relative_error(mine, torch.cat(theirs))
        for name, mine, theirs in zip(("dq", "dk", "dv"), ours, expected, strict=True)
    }
    shown = "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return max(errors.values()) <= LIMITS[heads.dtype], shown


def same_bits_again(backward: Backward, heads: Heads, lengths: Sequence[int]) -> Result:
    """The same bin more than once."""
    drawn = [Drawn.of(heads, length, seed=2) for length in lengths]
    first, *others = (gradients(backward, heads, drawn) for _ in range(TIMES))
    same = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return same, f"{TIMES} runs of {len(drawn)} sequences"


def alone_as_packed(backward: Backward, heads: Heads, lengths: Sequence[int]) -> Result:
    """Each sequence alone, and at each place of a bin with other lengths beside it."""
    wrong = []
    for length in lengths:
        mine = Drawn.of(heads, length, seed=3)
        alone = gradients(backward, heads, [mine])
        for before, behind in NEIGHBOURS:
            sides = [[Drawn.of(heads, one, seed=4) for one in side] for side in (before, behind)]
            packed = gradients(backward, heads, [*sides[0], mine, *sides[1]])
            rows = slice(sum(before), sum(before) + length)
            if not all(torch.equal(a, b[rows]) for a, b in zip(alone, packed, strict=True)):
                wrong.append(f"{length} at place {len(before)} of {len(before) + 1 + len(behind)}")
    if wrong:
        return False, f"other bits than alone: {', '.join(wrong[:6])}"
    return True, f"{len(lengths)} lengths, {len(NEIGHBOURS)} bins each"


def _no_queries(width: int) -> torch.Tensor:
    """Queries of this width on the GPU; on the CPU where there is none, to list the checks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, 4, width, dtype=torch.bfloat16, device=device)


def attention_checks() -> dict[str, Callable[[], tuple[bool, Any]]]:
    """Return the checks of FlashAttention 4 on this GPU, by name; without its kernel, the reason."""
    found: dict[str, Callable[[], tuple[bool, Any]]] = {}
    for width in WIDTHS:
        heads, name = Heads(width), f"FlashAttention 4's backward, width {width}"
        if reason := flash_attention_4.refusal(_no_queries(width)):
            found[name] = lambda reason=reason: (True, f"NOT MADE: {reason}")  # type: ignore[misc]
            continue
        for what, check, lengths in (
            ("float64", close_to_float64, COMPARED),
            ("same bits again", same_bits_again, LENGTHS),
            ("alone as in a bin", alone_as_packed, LENGTHS),
        ):
            found[f"{name}: {what}"] = partial(
                check, flash_attention_4.attention_backward, heads, lengths
            )
    return found
