"""The reference operations: right against float64, and in the same bits alone as in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from vllm_patching.batch_invariant import ops, reference
from vllm_patching.batch_invariant.pages import PAGE, make_page_plan, page_plan

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = 70


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def row_operations(dtype: torch.dtype) -> dict[str, Callable[[slice], torch.Tensor]]:
    """Name -> the operation on a slice of the same rows."""
    x, other = normal(TOKENS, 96, dtype=dtype), normal(TOKENS, 96, dtype=dtype, seed=1)
    weight, matrix, bias = (
        normal(*shape, dtype=dtype, seed=2) for shape in ((96,), (51, 96), (51,))
    )
    table = ops.rotary_table(32, 128, 1e4, dtype, torch.device("cpu"))
    experts = normal(7, 40, 96, dtype=dtype, seed=3), normal(7, 96, 20, dtype=dtype, seed=4)
    positions, targets = torch.arange(TOKENS), torch.arange(TOKENS) % 51
    return {
        "linear": lambda rows: ops.linear(x[rows], matrix, bias),
        "rms_norm": lambda rows: ops.rms_norm(x[rows], weight, 1e-6),
        "norm of heads": lambda rows: ops.rms_norm(x[rows].view(-1, 3, 32), weight[:32], 1e-6),
        "fused_add_rms_norm": lambda rows: torch.cat(
            ops.fused_add_rms_norm(x[rows], other[rows], weight, 1e-6), -1
        ),
        "rotary_embedding": lambda rows: torch.cat(
            ops.rotary_embedding(positions[rows], x[rows], other[rows], 32, table), -1
        ),
        "silu_and_mul": lambda rows: ops.silu_and_mul(x[rows]),
        "route": lambda rows: torch.cat([x.double() for x in ops.route(x[rows, :7], 3, True)], -1),
        "experts": lambda rows: ops.experts(x[rows], *ops.route(x[rows, :7], 3, True), *experts),
        "chosen_logprobs": lambda rows: ops.chosen_logprobs(x[rows], matrix, targets[rows]),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(row_operations(torch.float32)))
def test_a_row_has_the_same_bits_alone_as_in_any_batch(name: str, dtype: torch.dtype) -> None:
    operation = row_operations(dtype)[name]
    whole = operation(slice(0, TOKENS))
    for start, end in ((0, 1), (5, 6), (3, 20), (33, TOKENS)):
        assert torch.equal(operation(slice(start, end)), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_packed_as_alone_and_as_decoded(dtype: torch.dtype) -> None:
    lengths = [1, 16, 17, 33]
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (normal(sum(lengths), heads, 16, dtype=dtype, seed=heads) for heads in (4, 2, 2))
    packed, packed_lse = ops.attention_varlen(q, k, v, cu, max(lengths), 0.25)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for stop in {
            end,
            start + (end - start + 1) // 2,
        }:  # whole, and as it was before its last tokens were sampled
            part = slice(start, stop)
            alone = torch.tensor([0, stop - start], dtype=torch.int32)
            out, lse = ops.attention_varlen(q[part], k[part], v[part], alone, stop - start, 0.25)
            assert torch.equal(out, packed[part])
            assert torch.equal(lse, packed_lse[:, part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_bits_of_whole_sequences_where_they_share_keys(
    dtype: torch.dtype,
) -> None:
    """A prompt of 17 tokens, and two answers that continue it."""
    q, k, v = (normal(17 + 5 + 30, heads, 16, dtype=dtype, seed=heads) for heads in (4, 2, 2))
    own = torch.arange(17), torch.arange(17, 22), torch.arange(22, 52)
    rows = [own[0], *(torch.cat((own[0], answer)) for answer in own[1:])]
    cu, cu_keys = (
        torch.tensor([0, *map(len, parts)]).cumsum(0).to(torch.int32) for parts in (own, rows)
    )
    shared = ops.SeenKeys(torch.cat(rows), cu_keys, 47)
    out, lse = ops.attention_varlen(q, k, v, cu, 30, 0.25, shared)
    for answer, whole in zip(own, rows, strict=True):
        bounds = torch.tensor([0, len(whole)], dtype=torch.int32)
        alone, alone_lse = ops.attention_varlen(
            q[whole], k[whole], v[whole], bounds, len(whole), 0.25
        )
        assert torch.equal(out[answer], alone[-len(answer) :])
        assert torch.equal(lse[:, answer], alone_lse[:, -len(answer) :])


def test_attention_is_that_of_torch() -> None:
    q, k, v = (normal(40, heads, 16, dtype=torch.float64, seed=heads) for heads in (4, 2, 2))
    out, lse = ops.attention_varlen(q, k, v, torch.tensor([0, 40], dtype=torch.int32), 40, 0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        is_causal=True,
        scale=0.25,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    assert lse.shape == (4, 40)


def test_operations_are_those_of_float64() -> None:
    wide, x32 = row_operations(torch.float64), row_operations(torch.float32)
    for name, operation in x32.items():
        torch.testing.assert_close(
            operation(slice(None)).double(), wide[name](slice(None)).double(), rtol=1e-4, atol=1e-4
        )


def test_the_most_likely_experts_are_chosen_and_of_equal_ones_the_lower() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    weights, chosen = ops.route(logits, 2, renormalised=False)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, chosen))
    renormalised, same = ops.route(logits.bfloat16(), 2, renormalised=True)
    assert torch.equal(same, chosen)
    torch.testing.assert_close(renormalised, torch.full((2, 2), 0.5))


@pytest.mark.parametrize("loads", ["uneven", "one expert has all", "one token"])
def test_experts_are_those_of_float64(loads: str) -> None:
    tokens = 1 if loads == "one token" else 9
    x, w13, w2 = normal(tokens, 24), normal(5, 16, 24, seed=1), normal(5, 24, 8, seed=2)
    chosen = torch.tensor([[3, 1], [1, 3], [4, 1]]).repeat(3, 1)[:tokens]
    if loads == "one expert has all":
        chosen = torch.tensor([[2]] * tokens)
    weights = normal(*chosen.shape, seed=3)
    expected = torch.zeros(tokens, 24, dtype=torch.float64)
    for token, slot in itertools.product(range(tokens), range(chosen.shape[1])):
        expert = chosen[token, slot]
        gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
        out = w2[expert].double() @ (torch.nn.functional.silu(gate) * up)
        expected[token] += weights[token, slot].double() * out
    ours = ops.experts(x, weights, chosen, w13, w2)
    torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 4])
def test_experts_of_several_parts_are_the_sum_of_their_ranks(
    parts: int, dtype: torch.dtype
) -> None:
    """Each rank of vLLM has rows of gate and up projection and columns of the down projection."""
    x, inner = normal(11, 24, dtype=dtype), 16
    w13, w2 = normal(5, 2 * inner, 24, dtype=dtype, seed=1), normal(5, 24, inner, seed=2).to(dtype)
    routed = ops.route(x[:, :5], 2, renormalised=True)
    gate, up = w13.chunk(2, dim=1)
    share = inner // parts
    ranks = []
    for rank in range(parts):
        own = slice(rank * share, (rank + 1) * share)
        theirs = torch.cat((gate[:, own], up[:, own]), dim=1)
        ranks.append(ops.experts(x, *routed, theirs, w2[:, :, own].contiguous()))
    whole = ops.experts(x, *routed, w13, w2, parts)
    assert torch.equal(whole, ops.add_parts(torch.stack(ranks)))
    assert not torch.equal(whole, ops.experts(x, *routed, w13, w2))
    with pytest.raises(ValueError, match="an inner width of 16 cannot be cut into 3 equal parts"):
        ops.experts(x, *routed, w13, w2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorchs_grouped_product_is_the_product_of_each_row(dtype: torch.dtype) -> None:
    """The kernel of a GPU is called in the same way."""
    rows, weight = normal(20, 16, dtype=dtype), normal(4, 24, 16, dtype=dtype, seed=1)
    assigned = ops.assign(torch.tensor([[1], [3], [3], [1]]).repeat(5, 1), 4)
    assert assigned.ends.tolist() == [0, 10, 10, 20]
    ours = ops.grouped_product(rows, weight, assigned.ends)
    plain = ops.expert_linear(rows, weight, assigned.ends)
    torch.testing.assert_close(ours, plain, atol=5e-2, rtol=1e-2)
    with pytest.raises(ValueError, match=r"matrices \[24, 15\].* multiples of 16 bytes"):
        ops.grouped_product(rows[:, :15], weight[:, :, :15], assigned.ends)


def test_the_caller_keeps_what_it_passed() -> None:
    q, k = normal(4, 32), normal(4, 16, seed=1)
    before = q.clone(), k.clone()
    rotated, _ = ops.rotary_embedding(
        torch.arange(4) + 1, q, k, 16, ops.rotary_table(16, 8, 1e4, q.dtype, q.device)
    )
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert not torch.equal(rotated, q)


def test_norm_multiplies_by_the_weight_before_it_rounds() -> None:
    x, weight = normal(64, 96, dtype=torch.bfloat16), normal(96, dtype=torch.bfloat16, seed=1)
    once = ops.rms_norm(x, weight, 1e-6)
    twice = reference.rms_norm(x, torch.ones_like(weight), 1e-6) * weight
    assert not torch.equal(once, twice)


def test_pages_hold_each_sequence_in_order() -> None:
    lengths = [1, PAGE, PAGE + 1, 50]
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = sum(lengths)
    k, v = normal(tokens, 2, 8), normal(tokens, 2, 8, seed=1)
    plan = make_page_plan(cu, tokens, max(lengths))
    keys, values = plan.lay_out(k, v)
    assert keys.shape == (plan.pages, PAGE, 2, 8)
    assert plan.lengths.tolist() == lengths
    for row, (start, length) in enumerate(zip(cu.tolist(), lengths, strict=False)):
        pages = plan.block_table[row, : -(-length // PAGE)].long()
        assert torch.equal(keys[pages].flatten(0, 1)[:length], k[start : start + length])
        assert torch.equal(values[pages].flatten(0, 1)[:length], v[start : start + length])


def test_plan_is_made_anew_for_another_batch() -> None:
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    plan = page_plan(cu, 9, 6)
    assert page_plan(cu, 9, 6) is plan
    cu[1] = 5
    assert page_plan(cu, 9, 5).lengths.tolist() == [5, 4]
    assert page_plan(cu.clone(), 9, 5) is not plan
