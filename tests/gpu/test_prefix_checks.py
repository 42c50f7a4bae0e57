"""The checks of shared prefixes on the CPU: they pass, and each fails for its own mistake."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from example_trainer.models.ops import torch_gradients
from tests.example_trainer.deterministic.training import SMALL
from tests.gpu import prefix_checks
from tests.gpu.attention_checks import Heads
from tests.gpu.prefix_checks import (
    Group,
    attention_bits,
    model_bits,
    model_gradients,
    query_gradients,
)
from vllm_patching.batch_invariant import ops

TINY = Heads(8, device="cpu", dtype=torch.float32)
ANSWERS = (2, 17, 5)
GROUPS = [Group(prompt, ANSWERS, "cpu") for prompt in (1, 19)]
ATTENTION, BACKWARD = ops.attention_varlen, torch_gradients.attention_backward
CHECKS = {
    "attention's bits": partial(attention_bits, TINY, (1, 19), ANSWERS),
    "gradients of queries": partial(query_gradients, TINY, 19, ANSWERS),
    "a model's bits": partial(model_bits, SMALL, GROUPS),
    "a model's gradients": partial(model_gradients, SMALL, GROUPS[1]),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_passes(name: str) -> None:
    passed, seen = CHECKS[name]()
    assert passed, seen


def other_attention(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Attention with another value where a sequence continues another."""
    out, lse = ATTENTION(q, k, v, *given)
    if len(given) == 4 and given[3] is not None:
        out[-2] *= 1 + 1e-5
    return out, lse


def test_other_bits_of_attention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "attention_varlen", other_attention)
    passed, seen = CHECKS["attention's bits"]()
    assert not passed
    assert "a prompt of 1, 5 queries" in seen
    passed, seen = CHECKS["a model's bits"]()
    assert not passed
    assert "behind a prompt of" in seen


def test_gradients_that_miss_an_answer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(upstream: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = BACKWARD(upstream, *given)
        shared = given[5].shared
        return (dq * 1.5, dk, dv * 0.5) if shared else (dq, dk, dv)

    monkeypatch.setattr(torch_gradients, "attention_backward", forgetful)
    assert not CHECKS["gradients of queries"]()[0]
    assert not CHECKS["a model's gradients"]()[0]


def test_gradients_that_do_not_repeat_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = itertools.count()
    plain = prefix_checks.tree_gradients

    def drifting(*given: Any, **named: Any) -> dict[str, Tensor]:
        grown = 1 + 1e-6 * next(runs)
        return {name: grown * gradient for name, gradient in plain(*given, **named).items()}

    monkeypatch.setattr(prefix_checks, "tree_gradients", drifting)
    passed, seen = CHECKS["a model's gradients"]()
    assert not passed
    assert seen.startswith("layers kept: ")
