"""Attention on packed sequences: spans, the sequences that they see, and torch's attention beside vLLM's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

from example_trainer.deterministic import FlashAttnWithBackward, VLLMCompatibleFlashAttention
from example_trainer.models.packing import NO_PARENT, TILE, Packing
from tests.example_trainer.models.test_packed_gradients import Tree, sequence_rows, trees

WIDTH = 8


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def same_as_torch(out: Tensor, parts: list[Tensor], wanted: Tensor) -> None:
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for found, right in zip(
        torch.autograd.grad(out, parts, slope),
        torch.autograd.grad(wanted, parts, slope.double()),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(
    ("batch", "length"), [(1, 4), (3, 5), (4, 4)]
)  # 4 heads of 4 tokens could be read both ways
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_axes_are_those_of_torchs_attention(
    batch: int, length: int, heads: int, kv_heads: int, scale: float | None
) -> None:
    parts = drawn((batch, heads, length, WIDTH), *[(batch, kv_heads, length, WIDTH)] * 2)
    grouped = heads != kv_heads
    out = VLLMCompatibleFlashAttention()(*parts, scale=scale, enable_gqa=grouped)
    assert out.shape == parts[0].shape
    doubles = [part.double() for part in parts]
    same_as_torch(
        out,
        parts,
        F.scaled_dot_product_attention(*doubles, is_causal=True, scale=scale, enable_gqa=grouped),
    )


def by_sequence(parts: list[Tensor], lengths: list[int]) -> Tensor:
    """torch's attention of packed sequences, [tokens, heads, width], one after the other."""
    pieces = zip(
        *(part.double().transpose(0, 1).split(lengths, dim=1) for part in parts), strict=True
    )
    return torch.cat(
        [F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True) for one in pieces],
        dim=1,
    ).transpose(0, 1)


@pytest.mark.parametrize("form", ["module", "function"])
def test_packed_sequences_of_any_lengths(form: str) -> None:
    lengths = [1, 9, 4]
    parts = drawn((14, 4, WIDTH), (14, 2, WIDTH), (14, 2, WIDTH))
    if form == "module":
        out = VLLMCompatibleFlashAttention()(*parts, packing=Packing(lengths), enable_gqa=True)
    else:
        out = FlashAttnWithBackward.apply(
            *parts, torch.tensor([0, 1, 10, 14], dtype=torch.int32), 9, WIDTH**-0.5, 1
        )
        shorter = FlashAttnWithBackward.apply(
            *parts, torch.tensor([0, 1, 10, 14], dtype=torch.int32), 9
        )
        assert torch.equal(out, shorter)
    same_as_torch(out, parts, by_sequence(parts, lengths))


def test_what_does_not_fit_is_refused_with_the_shapes() -> None:
    attention = VLLMCompatibleFlashAttention()
    q, k, v = drawn((2, 4, 3, WIDTH), *[(2, 2, 3, WIDTH)] * 2)
    with pytest.raises(
        ValueError,
        match=r"queries \(2, 4, 3, 8\), keys \(2, 2, 3, 8\).*: 2 key heads.* need enable_gqa=True",
    ):
        attention(q, k, v)
    with pytest.raises(ValueError, match=r"give \[batch, heads, length, head_dim\] each"):
        attention(q, k[:, :, :2], v[:, :, :2], enable_gqa=True)
    length_first = [part.transpose(1, 2) for part in (q, k, v)]
    with pytest.raises(ValueError, match=r"queries \(2, 3, 4, 8\).*give \[batch, heads, length"):
        attention(*length_first, enable_gqa=True)
    with pytest.raises(ValueError, match=r"give \[tokens, heads, head_dim\] each, beside packing="):
        attention(q, k, v, packing=Packing([3, 3]), enable_gqa=True)
    with pytest.raises(ValueError, match="packed sequences need packing="):
        attention(q[0], k[0], v[0])
    with pytest.raises(ValueError, match="the packing has 5 tokens"):
        attention(*drawn(*[(6, 2, WIDTH)] * 3), packing=Packing([5]))
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key heads evenly"):
        attention(q, *(torch.randn(2, 3, 3, WIDTH) for _ in range(2)), enable_gqa=True)


@pytest.mark.parametrize(
    ("bounds", "longest", "splits", "message"),
    [
        ([0, 3, 5], 3, 1, "do not fit 6 tokens"),
        ([0, 3, 6], 2, 1, "the length of the longest sequence"),
        ([0, 4, 3, 6], 4, 1, "do not fit 6 tokens"),
        ([0, 6], 6, 0, "num_splits 0: give 1"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(
    bounds: list[int], longest: int, splits: int, message: str
) -> None:
    parts = drawn(*[(6, 2, WIDTH)] * 3)
    with pytest.raises(ValueError, match=message):
        FlashAttnWithBackward.apply(
            *parts, torch.tensor(bounds, dtype=torch.int32), longest, None, splits
        )


@given(trees())
def test_every_span_sees_its_own_sequence_and_nothing_else(tree: Tree) -> None:
    packing = Packing(tree.lengths, parents=tree.parents)
    sequences = [rows.tolist() for rows in sequence_rows(tree)]
    assert packing.seen == tuple(map(len, sequences))
    assert packing.longest == max(map(len, sequences))
    positions, pairs = [], 0
    for sequence, length in zip(sequences, tree.lengths, strict=True):
        own = range(len(sequence) - length, len(sequence))
        positions += own
        pairs += sum(position + 1 for position in own)
    assert packing.positions.tolist() == positions
    assert packing.attended_pairs == pairs
    assert packing.shared == any(parent != NO_PARENT for parent in tree.parents)
    keys = list(range(packing.tokens)) if packing.key_rows is None else packing.key_rows.tolist()
    bounds = packing.cu_keys.tolist()
    assert [keys[a:b] for a, b in pairwise(bounds)] == sequences


@given(trees())
def test_tiles_of_shared_spans_find_keys_and_queries(tree: Tree) -> None:
    packing = Packing(tree.lengths, parents=tree.parents)
    sequences = [rows.tolist() for rows in sequence_rows(tree)]
    seeing = [
        [n for n, path in enumerate(tree.paths) if span in path]
        for span in range(len(tree.lengths))
    ]
    assert packing.nested == all(spans == list(range(spans[0], spans[-1] + 1)) for spans in seeing)
    key_rows = torch.arange(packing.tokens) if packing.key_rows is None else packing.key_rows
    numbers = packing.numbers.tolist()
    for start, length, first, shift, end in zip(
        *(c.tolist() for c in packing.tiles(2)), strict=True
    ):
        span = numbers[start]
        seen = key_rows[first + shift : packing.begins[span + 1] + shift].tolist()
        assert seen == sequences[span]
        own = range(start, start + length)
        assert key_rows[start + shift : start + length + shift].tolist() == list(own)
        assert end == packing.begins[seeing[span][-1] + 1]


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ([], None, r"spans of lengths \[\] cannot be packed"),
        ([3, 0], None, r"spans of lengths \[3, 0\] cannot be packed"),
        ([3, 1], [-1], "1 parents do not fit 2 spans"),
        ([3, 1], [-1, 1], r"parents \[-1, 1\]: a span continues an earlier one"),
        ([3, 1], [-2, 0], r"parents \[-2, 0\]: a span continues an earlier one"),
    ],
)
def test_what_is_no_packing_is_refused(
    lengths: list[int], parents: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Packing(lengths, parents=parents)


def test_a_tile_never_holds_tokens_of_two_spans() -> None:
    packing = Packing([1, TILE, TILE + 1, 2 * TILE])
    for size in (TILE, TILE // 2, 2 * TILE):
        tiles = packing.tiles(size)
        assert packing.tiles(size) is tiles, "made once"
        starts, lengths, begins, shifts, ends = (column.tolist() for column in tiles)
        covered = [
            row
            for start, length in zip(starts, lengths, strict=True)
            for row in range(start, start + length)
        ]
        assert covered == list(range(packing.tokens))
        assert max(lengths) == min(size, 2 * TILE)
        assert set(zip(begins, ends, strict=True)) == set(packing.spans())
        assert not any(shifts), "keys lie where the tokens do"
        assert all(
            b <= s and s + n <= e for s, n, b, e in zip(starts, lengths, begins, ends, strict=True)
        )
    assert packing.cu_seqlens.dtype == torch.int32
