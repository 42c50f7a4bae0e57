"""The checks of a mixture's operations on the CPU: they pass, and each fails for its own mistake."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.mixture_checks import ROUTINGS, Layer, choices, gradients, outputs, products
from vllm_patching.batch_invariant import ops, reference

TINY = Layer(8, 2, hidden=32, inner=16, tokens=70, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("check", [choices, products, outputs, gradients])
def test_the_reference_does_not_depend_on_the_batch(check: Any, routing: str) -> None:
    passed, seen = check(TINY, routing)
    assert passed, seen


def test_parts_are_checked_too() -> None:
    assert outputs(TINY, "unevenly", 4)[0]


def by_batch(x: Tensor, weight: Tensor, ends: Tensor, tokens: Tensor | None = None) -> Tensor:
    """A product that rounds otherwise where there are many rows."""
    rows = x if tokens is None else x[tokens]
    product = reference.expert_linear(rows, weight, ends)
    return product * (1 + 1e-6) if len(rows) > 100 else product


@pytest.mark.parametrize("check", [products, outputs, gradients])
def test_a_product_that_depends_on_the_batch_is_found(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "expert_linear", by_batch)
    passed, seen = check(TINY, "evenly")
    assert not passed, seen


def test_a_router_that_takes_the_last_of_equal_experts_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def last(logits: Tensor, count: int, renormalised: bool) -> tuple[Tensor, Tensor]:
        weights, chosen = reference.route(logits.flip(-1), count, renormalised)
        return weights, logits.shape[-1] - 1 - chosen

    monkeypatch.setattr(ops, "route", last)
    passed, seen = choices(TINY, "by ties")
    assert not passed
    assert "ties False" in seen


def test_wrong_outputs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = partial(ops.experts)
    monkeypatch.setattr(ops, "experts", lambda *arguments: 1.1 * wrong(*arguments))
    assert not outputs(TINY, "evenly")[0]
