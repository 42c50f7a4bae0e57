"""Sums of tensor-parallel parts: the plan, the reference operations, and the Triton kernel."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forked_commands import start_unguarded
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant import self_test as testing
from vllm_patching.batch_invariant.layouts_test import (
    row_check,
    split_attention_failure,
    width_checks,
)
from vllm_patching.batch_invariant.plan import ENTRY, PARTS, SumPlan, plan_of
from vllm_patching.batch_invariant.provenance import provenance, provenance_difference
from vllm_patching.batch_invariant.self_test import first_difference

ROOT = Path(__file__).resolve().parents[3]
DTYPES = (torch.float32, torch.bfloat16)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("parts", PARTS)
def test_a_provenance_carries_the_plan(parts: int) -> None:
    plan = SumPlan(parts)
    assert plan_of(provenance(plan)) == plan
    assert plan.trainer_ranks() == [n for n in PARTS if n <= parts]
    assert plan.parts_of_rank(parts) == 1
    difference = provenance_difference(provenance(), provenance(plan))
    assert difference == (
        "" if parts == 1 else f"{ENTRY}: 'parts=1' here, {f'parts={parts}'!r} there"
    )


def test_a_server_without_a_plan_sums_one_part() -> None:
    assert plan_of({"linear": "cublaslt"}) == SumPlan(1)


@pytest.mark.parametrize("entry", ["2", "parts=", "parts=-2", "parts=3", "parts=16", "tree"])
def test_an_unknown_plan_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form parts=N|a sum of"):
        plan_of({ENTRY: entry})


def test_ranks_that_cannot_share_the_parts_are_refused() -> None:
    with pytest.raises(
        ValueError, match="4 ranks cannot compute equal shares of 2 parts: take 1 or 2"
    ):
        SumPlan(2).parts_of_rank(4)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    count=st.integers(1, 8),
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_parts_are_added_in_their_order_and_rounded_once(
    count: int, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    parts = normal(count, rows, columns, dtype=dtype, seed=seed)
    total = ops.add_parts(parts)
    one = [torch.zeros(1)]
    for row in range(rows):
        one = [parts[0, row].float()]
        for part in range(1, count):
            one.append(one[-1] + parts[part, row].float())
        assert torch.equal(total[row], one[-1].to(dtype))
        assert torch.equal(ops.add_parts(parts[:, row : row + 1])[0], total[row])
    exact = parts.double().sum(0)
    # A bound of the error of a float32 sum, then of one rounding.
    bound = 8 * 2.0**-24 * parts.double().abs().sum(0) + exact.abs() * torch.finfo(dtype).eps / 2
    assert bool(((total.double() - exact).abs() <= bound * 1.01).all())


def test_the_order_of_the_parts_matters() -> None:
    parts = torch.tensor([1.0, 2.0**25, -(2.0**25)]).view(3, 1, 1)
    assert ops.add_parts(parts).item() == 0.0
    assert ops.add_parts(parts.flip(0)).item() == 1.0


def test_a_sum_is_the_callers_own_and_a_zero_gets_a_sign() -> None:
    parts = torch.full((1, 2, 3), -0.0)
    total = ops.add_parts(parts)
    assert total.data_ptr() != parts.data_ptr()
    assert bool(total.signbit().all())
    with_zero = torch.cat((parts, torch.zeros_like(parts)))
    assert not bool(ops.add_parts(with_zero).signbit().any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", PARTS)
def test_a_row_product_is_the_sum_of_the_ranks_products(count: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        normal(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(((11, 64), (24, 64), (24,)))
    )
    ranks = [
        ops.linear(columns.contiguous(), of_weight.contiguous(), bias if rank == 0 else None)
        for rank, (columns, of_weight) in enumerate(
            zip(x.chunk(count, 1), weight.chunk(count, 1), strict=True)
        )
    ]
    whole = ops.row_linear(x, weight, count, bias)
    assert torch.equal(whole, ops.add_parts(ops.row_parts(x, weight, count, bias)))
    assert torch.equal(whole, ops.add_parts(torch.stack(ranks)))
    assert torch.equal(ops.row_linear(x[3:4], weight, count, bias), whole[3:4])
    exact = x.double() @ weight.double().t() + bias.double()
    assert float((whole.double() - exact).norm() / exact.norm()) < 2 * torch.finfo(dtype).eps
    if dtype is torch.bfloat16 and count > 1:
        assert not torch.equal(whole, ops.linear(x, weight, bias)), "rounded in other places"


def test_columns_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="6 columns cannot be cut into 4 equal parts"):
        ops.row_linear(torch.zeros(1, 6), torch.zeros(2, 6), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 64, 96])
def test_a_column_has_the_same_bits_in_a_product_of_any_width(
    columns: int, dtype: torch.dtype
) -> None:
    """A rank of vLLM has some rows of qkv_proj, gate_up_proj and the head."""
    x = normal(5, columns, dtype=dtype)
    weight = normal(384, columns, dtype=dtype, seed=1)
    whole = ops.linear(x, weight)
    for count in PARTS:
        ranks = [ops.linear(x, rows) for rows in weight.chunk(count)]
        assert torch.equal(torch.cat(ranks, -1), whole)


def failures(ranks: int) -> list[str]:
    """First differences of a rank's widths, on this machine."""
    weight, x = normal(24, 16, dtype=torch.bfloat16), normal(40, 16, dtype=torch.bfloat16, seed=1)
    checks = list(width_checks({"qkv_proj": (weight, x)}, ranks))
    assert len(checks) == ranks.bit_length() - 1
    return [first_difference(*check[:1], check[2], check[1], check[3]) for check in checks]


def test_the_self_test_compares_a_ranks_width_with_wider_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert failures(4) == ["", ""]
    assert failures(1) == []
    plain = ops.linear

    def by_width(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = plain(x, weight)
        if len(weight) == 96 and len(x) == 7:
            y[5, 50] += 1
        return y

    monkeypatch.setattr(ops, "linear", by_width)
    fine, wrong = failures(4)
    assert fine == ""
    assert wrong.startswith(
        "linear qkv_proj [24, 16] within 4 times the width depends on the layout: of 7 rows by "
        "themselves and of the same in the other layout, 1 values differ, first at row 5, column 50: "
    )


def test_the_self_test_compares_the_trainers_sum_with_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = normal(24, 16, dtype=torch.bfloat16), normal(40, 16, dtype=torch.bfloat16, seed=1)

    def failure() -> str:
        name, total, operation, expected = row_check("o_proj", weight, x, 4)
        return first_difference(name, operation, total, expected)

    assert failure() == ""
    plain = ops.add_parts
    monkeypatch.setattr(ops, "add_parts", lambda parts: plain(parts[1:]))
    assert failure().startswith(
        "row_linear o_proj [24, 16] in 4 parts depends on the layout: of 1 "
    )


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 4, 4), (8, 2, 8), (4, 4, 2)])
def test_the_self_test_compares_a_ranks_heads_with_all(
    heads: int, kv_heads: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)

    def failure() -> str:
        return split_attention_failure(heads, kv_heads, 16, ranks, like, (1, 9))

    assert failure() == ""
    plain = ops.attention_varlen

    def by_heads(q: torch.Tensor, *others: torch.Tensor, **more: Any) -> Any:
        out, lse = plain(q, *others, **more)
        if q.shape[1] < heads:
            out[3, 0, 2] += 1
        return out, lse

    monkeypatch.setattr(ops, "attention_varlen", by_heads)
    assert failure().startswith(
        f"attention of {heads // 2} of {heads} heads differs from that of all heads: first at row 3"
    )


def small_rank() -> SimpleNamespace:
    """The modules of one of vLLM's ranks that the self-test reads, with random weights."""

    def linear(rows: int, columns: int, seed: int) -> SimpleNamespace:
        return SimpleNamespace(weight=normal(rows, columns, dtype=torch.bfloat16, seed=seed))

    table = ops.rotary_table(8, 64, 1e4, torch.bfloat16, torch.device("cpu"))
    attention = SimpleNamespace(
        qkv_proj=linear(32, 16, 0), o_proj=linear(16, 16, 1), head_dim=8, q_size=16, kv_size=8,
        rotary_emb=SimpleNamespace(cos_sin_cache=table, is_neox_style=True),
        total_num_heads=4, total_num_kv_heads=2,
    )  # fmt: skip
    mlp = SimpleNamespace(
        gate_up_proj=linear(24, 16, 2), down_proj=linear(16, 12, 3), act_fn=torch.nn.Identity()
    )
    norm = SimpleNamespace(weight=normal(16, dtype=torch.bfloat16), variance_epsilon=1e-6)
    layer = SimpleNamespace(self_attn=attention, mlp=mlp, input_layernorm=norm)
    embedding = SimpleNamespace(embed_tokens=linear(64, 16, 4), layers=[layer])
    return SimpleNamespace(model=embedding)


def test_the_self_test_of_several_ranks_tests_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that need vLLM's layers or a GPU."""
    for name, value in {"ROWS": 9, "HEAD_ROWS": 6}.items():
        monkeypatch.setattr(testing, name, value)
    monkeypatch.setattr(testing, "_layers_failure", lambda layer: "")
    monkeypatch.setattr(testing, "attention_failure", lambda *shape: "")
    monkeypatch.setattr(testing, "split_attention_failure", lambda *shape: f"heads {shape[:4]}")
    monkeypatch.setattr(testing, "rank_sum_failure", lambda layer, ranks: "")
    one, four = testing.self_test(small_rank()), testing.self_test(small_rank(), 4)
    assert one["failure"] == ""
    assert four["failure"] == "heads (4, 2, 8, 4)"
    batches = {9: 2 * 7, 6: 2 * 5}  # at both ends, of every size below the rows
    # The sum of parts, qkv_proj and gate_up_proj at two widths, o_proj; the head at two widths.
    assert four["checks"] - one["checks"] == (1 + 2 * 2 + 1) * batches[9] + 2 * batches[6]
    monkeypatch.setattr(testing, "rank_sum_failure", lambda layer, ranks: "a sum differs")
    assert testing.self_test(small_rank(), 2)["failure"] == "a sum differs"


KERNEL = """
import torch
from vllm_patching.batch_invariant import kernels, reference

def check(parts):
    expected = reference.add_parts(parts.float())
    if parts.dtype is torch.bfloat16:
        expected = (expected.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    assert torch.equal(kernels.add_parts(parts), expected), (parts.dtype, parts.shape)

for dtype in (torch.float32, torch.bfloat16):
    for count, rows, columns in ((1, 3, 5), (2, 1, 1024), (3, 4, 1025), (4, 2, 2050), (8, 5, 64)):
        wide = torch.randn(rows, count, columns + 3).to(dtype).transpose(0, 1)
        for parts in (wide[..., :columns], wide[..., 1 : columns + 1]):
            check(parts)
        check(torch.randn(count, columns, rows).to(dtype).transpose(1, 2))
assert kernels.add_parts(torch.zeros(2, 0, 4)).shape == (0, 4)
for shape in ((9, 1, 1), (2, 2)):
    try:
        kernels.add_parts(torch.zeros(shape))
    except ValueError as error:
        assert "1 to 8, rows, out" in str(error)
    else:
        raise AssertionError(shape)
print("KERNEL AGREES")
"""
"""Triton's interpreter cuts a float32 to bf16 where a GPU rounds it."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_adds_as_the_reference_does(tmp_path: Path) -> None:
    """Under Triton's interpreter, so without a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", KERNEL]
        process = start_unguarded(command, log.fileno(), environment, ROOT)
    status, output = process.wait(120), (tmp_path / "log").read_text()
    assert (status, "KERNEL AGREES" in output) == (0, True), output[-2000:]
