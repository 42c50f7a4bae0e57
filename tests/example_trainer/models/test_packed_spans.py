"""Where spans lie and what they see, against a walk over each sequence token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given

from example_trainer.models.packing import NO_PARENT, TILE, Packing
from tests.example_trainer.models.test_packed_gradients import Tree, sequence_rows, trees


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
    for tiles, size in ((packing.tiles(), TILE), (packing.halves(), TILE // 2)):
        starts, lengths, begins, ends = (column.tolist() for column in tiles)
        covered = [
            row
            for start, length in zip(starts, lengths, strict=True)
            for row in range(start, start + length)
        ]
        assert covered == list(range(packing.tokens))
        assert max(lengths) == size
        assert set(zip(begins, ends, strict=True)) == set(packing.spans())
        assert all(
            b <= s and s + n <= e for s, n, b, e in zip(starts, lengths, begins, ends, strict=True)
        )
    assert packing.cu_seqlens.dtype == torch.int32
