"""Buckets: bounded, in order, every byte once; and the sums of pieces equal the sums of the
whole.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometries import geometry_of
from vllm_patching.protocol.checksum import Part, Row, WeightSums, summary_of
from vllm_patching.protocol.manifest import (
    ALIGNMENT,
    BUCKET_BYTES,
    FlatSlice,
    Manifest,
    ManifestEntry,
    buckets,
    flat_layout,
)
from vllm_patching.weights.regions import row_major
from vllm_patching.weights.sharding import SourceSlice, plan_shards

LAYOUTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=2),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ),
    min_size=1,
    max_size=6,
)


def layout_of(shapes: list[tuple[list[int], torch.dtype]]) -> list[FlatSlice]:
    """A layout of slices of these shapes."""
    layout, offset = [], 0
    for number, (shape, dtype) in enumerate(shapes):
        size = torch.Size(shape).numel() * dtype.itemsize
        name, whole = f"w{number}", tuple(shape)
        piece = SourceSlice(name, whole, 0, row_major(whole).strides, 0)
        layout.append(FlatSlice(name, piece, whole, dtype, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return layout


@settings(max_examples=200, deadline=None)
@given(shapes=LAYOUTS, limit=st.integers(16, 3000))
def test_every_row_is_in_one_bucket_and_buckets_are_bounded(
    shapes: list[tuple[list[int], torch.dtype]], limit: int
) -> None:
    layout = layout_of(shapes)
    found = buckets(layout, limit)
    rows = [
        (piece.item, row)
        for bucket in found
        for piece in bucket.pieces
        for row in range(piece.first, piece.last)
    ]
    assert rows == [
        (index, row) for index, item in enumerate(layout) for row in range(item.shape[0])
    ]
    for bucket in found:
        end = 0
        for piece in bucket.pieces:
            item = layout[piece.item]
            row_bytes = item.num_bytes // item.shape[0]
            assert (piece.offset % ALIGNMENT, piece.start % ALIGNMENT, piece.offset >= end) == (
                0,
                0,
                True,
            )
            assert (piece.start, piece.num_bytes) == (
                piece.first * row_bytes,
                (piece.last - piece.first) * row_bytes,
            )
            end = piece.offset + piece.num_bytes
        smallest_cut = max(
            row_bytes * ALIGNMENT for row_bytes in (i.num_bytes // i.shape[0] for i in layout)
        )
        assert end <= bucket.num_bytes <= max(limit + ALIGNMENT, smallest_cut)
        assert bucket.payload <= max(limit, smallest_cut)
    assert sum(bucket.payload for bucket in found) == sum(item.num_bytes for item in layout)


@settings(max_examples=100, deadline=None)
@given(shapes=LAYOUTS, limit=st.integers(16, 3000), spoilt=st.booleans(), data=st.data())
def test_pieces_sum_up_to_what_the_whole_does(
    shapes: list[tuple[list[int], torch.dtype]], limit: int, spoilt: bool, data: st.DataObject
) -> None:
    """In any order, and with any split of the summing."""
    layout = layout_of(shapes)
    torch.manual_seed(0)
    weights = [torch.randn(item.shape).to(item.dtype) for item in layout]
    if spoilt:
        weights[-1].view(-1)[-1] = float("nan")
    whole = WeightSums(
        [(item.name, tensor) for item, tensor in zip(layout, weights, strict=True)]
    ).all()
    buffers = []
    parts = []
    for bucket in buckets(layout, limit):
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        buffers.append(buffer)
        for piece in bucket.pieces:
            place = piece.in_buffer(buffer, layout[piece.item])
            place.copy_(piece.of(weights[piece.item]))
            parts.append(Part(piece.item, piece.start, place))
    rows = [Row(item.name, item.shape, item.dtype) for item in layout]
    order = data.draw(st.permutations(parts))
    cut = data.draw(st.integers(0, len(order)))
    tables = []
    for mine in (order[:cut], order[cut:]):
        sums = WeightSums.of_parts(rows, mine, torch.device("cpu"))
        sums.add(0, len(mine))
        tables.append(sums.rows())
    assert summary_of(rows, *tables) == whole
    assert whole.not_finite == (layout[-1].name if spoilt else "")


def test_a_large_model_has_full_buckets() -> None:
    """Qwen3-1.7B's shape: its embedding alone is five buckets."""
    geometry = geometry_of("Qwen3", 28, 2048, 6144, 16, 8, 128, 151936, tie_word_embeddings=True)
    specs = plan_shards(geometry, 0, 1)
    layout, num_bytes = flat_layout(
        Manifest(0, 1, tuple(ManifestEntry(spec, "bfloat16", "cuda:0") for spec in specs))
    )
    found = buckets(layout)
    assert all(
        BUCKET_BYTES - 2 * 4096 * 16 < bucket.num_bytes <= BUCKET_BYTES for bucket in found[:-1]
    )
    assert len(found) == -(-num_bytes // BUCKET_BYTES)
