"""Every table computes the same: each operation beside float64 autograd of its formula, with totals
and without.
"""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from example_trainer.models.ops import (
    Operations,
    choose_operations,
    fast_attention,
    invariant,
    reference,
)
from example_trainer.models.packing import Packing
from tests.example_trainer.deterministic.cases import CASES, LIMITS, Sizes, errors

TABLES: dict[str, Operations] = {table.NAME: table for table in (reference, invariant)}
HYPOTHESIS = settings(
    max_examples=5,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    kv_heads = draw(st.sampled_from([1, 2]))
    lengths = draw(
        st.lists(st.integers(1, 20), min_size=1, max_size=4)
        | st.builds(lambda n, k: [n] * k, st.integers(1, 9), st.just(3))
    )
    return Sizes(
        lengths=tuple(lengths),
        hidden=draw(st.sampled_from([8, 24])),
        inner=draw(st.sampled_from([4, 12])),
        heads=kv_heads * draw(st.sampled_from([1, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 20])),
        vocab=draw(st.integers(2, 70)),
    )


@pytest.mark.parametrize("totals", [False, True], ids=["autograd", "totals"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "f64"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", CASES)
@HYPOTHESIS
@given(sizes=sizes(), seed=st.integers(0, 1000))
def test_operations_equal_their_formulas(
    name: str, table: str, dtype: torch.dtype, totals: bool, sizes: Sizes, seed: int
) -> None:
    for key, error in errors(
        name, sizes, dtype, seed=seed, ops=TABLES[table], totals=totals
    ).items():
        assert error <= LIMITS[dtype], f"{key} of {name}, {sizes}"


def test_the_invariant_table_refuses_spans_with_others_between_them() -> None:
    q = torch.randn(6, 2, 8)
    with pytest.raises(ValueError, match=r"parents \[-1, -1, 0\].*right behind the spans that it"):
        invariant.attention(q, q, q, Packing([2, 3, 1], parents=[-1, -1, 0]), 1.0)


def test_the_invariant_table_refuses_another_temperature() -> None:
    hidden, targets = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    for temperature in (0.5, torch.tensor([1.0, 0.5, 1.0])):
        with pytest.raises(ValueError, match=r"take temperature 1, not 0\.5"):
            invariant.chosen_logprobs(hidden, hidden, targets, temperature=temperature)


@pytest.mark.parametrize("table", TABLES)
def test_temperatures_of_one_and_a_differentiable_entropy_change_no_bit(table: str) -> None:
    generator, packing = torch.Generator().manual_seed(5), Packing([130, 20])
    targets, upstream = (
        torch.randint(0, 211, (150,), generator=generator),
        torch.randn(150, generator=generator),
    )
    draws = torch.randn(150, 24, generator=generator), torch.randn(211, 24, generator=generator)

    def found(
        temperature: float | torch.Tensor, entropy_gradient: bool = False
    ) -> list[torch.Tensor]:
        hidden, weight = (draw.clone().requires_grad_() for draw in draws)
        arguments = hidden, weight, targets, packing, 64, temperature
        logprobs, entropy = TABLES[table].chosen_logprobs(
            *arguments, entropy_gradient=entropy_gradient
        )
        assert entropy.requires_grad == entropy_gradient
        gradients = torch.autograd.grad(logprobs, (hidden, weight), upstream)
        return [logprobs, entropy, *(() if entropy_gradient else gradients)]

    plain = found(1.0)
    for other in (found(torch.ones(150)), found(1.0, entropy_gradient=True)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=False))


@pytest.mark.parametrize("table", TABLES)
def test_every_target_needs_its_own_temperature(table: str) -> None:
    hidden, targets = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"temperatures of shape \[1\] for 3 targets"):
        TABLES[table].chosen_logprobs(hidden, hidden, targets, Packing([3]), 8, torch.ones(1))


def test_a_table_is_chosen_by_mode_device_and_dtype() -> None:
    cpu = torch.device("cpu")
    assert choose_operations(cpu, torch.bfloat16) is reference
    assert choose_operations(cpu, torch.float32, deterministic=True) is invariant
    assert choose_operations(torch.device("cuda"), torch.float32) is reference


def test_rows_may_be_chosen_again_where_spans_share() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([1, 3, 1])
    upstream = torch.randn(3, 3, dtype=torch.float64)
    reference.rows(x, chosen).backward(upstream)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    expected[1], expected[3] = upstream[0] + upstream[2], upstream[1]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_heads_repeated_for_attention_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As float32 does it on a GPU, whose kernels would otherwise keep length × length matrices."""
    q, kv, packing = torch.randn(9, 4, 8), torch.randn(9, 2, 8), Packing([4, 5])
    shared = reference.attention(q, kv, kv, packing, 0.3)
    monkeypatch.setattr(reference, "_repeats_heads", lambda q: True)
    torch.testing.assert_close(
        reference.attention(q, kv, kv, packing, 0.3), shared, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("capability", "level", "reason"),
    [
        ((9, 0), logging.WARNING, "install requirements-gpu.txt"),
        ((8, 9), logging.INFO, "compute capability 8.9"),
    ],
)
def test_attention_without_the_fast_library_says_what_that_costs(
    capability: tuple[int, int],
    level: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(
        sys.modules, "vllm.vllm_flash_attn.cute", None
    )  # as where it is not installed
    caplog.set_level(logging.INFO, fast_attention.logger.name)
    assert (
        fast_attention._library.__wrapped__(torch.device("cuda"))
        is fast_attention._flash_attention_2
    )
    ((_, told, message),) = caplog.record_tuples
    assert (told, "twice as long as FlashAttention 4" in message, reason in message) == (
        level,
        True,
        True,
    )
