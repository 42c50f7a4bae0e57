"""Messages of the bridge: manifests, checksums and the pieces of weights, exact and in order."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometries import geometry_of
from vllm_patching.protocol import checksum
from vllm_patching.protocol.checksum import Part, Row, WeightSums, summary_of, weights_checksum
from vllm_patching.protocol.manifest import (
    ALIGNMENT,
    BUCKET_BYTES,
    FlatSlice,
    Manifest,
    ManifestEntry,
    buckets,
    dtype_name,
    flat_layout,
    flat_views,
    local_view,
    mismatches,
    parse_dtype,
    source_view,
)
from vllm_patching.weights.regions import row_major
from vllm_patching.weights.sharding import LearnedShard, SourceSlice, plan_shards

GEOMETRY = geometry_of("Qwen3", 2, 12, 8, 4, 2, 3, 70)


def manifest(rank: int = 0, size: int = 2, dtype: str = "bfloat16") -> Manifest:
    return Manifest(
        rank,
        size,
        tuple(ManifestEntry(spec, dtype, "cpu") for spec in plan_shards(GEOMETRY, rank, size)),
    )


def trainer(dtype: str = "bfloat16") -> dict[str, tuple[tuple[int, ...], str]]:
    return {spec.name: (spec.full_shape, dtype) for spec in plan_shards(GEOMETRY, 0, 1)}


def test_json_round_trip_is_exact() -> None:
    original = manifest(1)
    assert Manifest.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_a_changed_manifest_does_not_match_its_digest() -> None:
    data = manifest().to_json()
    data["param_mappings"]["model.norm.weight"]["shape"] = [13]
    with pytest.raises(ValueError, match="digest"):
        Manifest.from_json(data)
    del data["param_mappings"]
    with pytest.raises(ValueError, match="param_mappings"):
        Manifest.from_json(data)


def test_equal_sides_have_no_mismatch() -> None:
    assert mismatches(manifest(), trainer()) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda t: t.pop("model.norm.weight"),
            "model.norm.weight: vLLM has it, the trainer does not",
        ),
        (
            lambda t: t.update({"extra.bias": ((3,), "bfloat16")}),
            "extra.bias: the trainer has it, vLLM does not",
        ),
        (
            lambda t: t.update({"model.norm.weight": ((12,), "float32")}),
            "model.norm.weight: dtype float32 in the trainer, bfloat16 in vLLM",
        ),
        (
            lambda t: t.update({"model.norm.weight": ((13,), "bfloat16")}),
            "model.norm.weight: shape (13,) in the trainer, (12,) in vLLM",
        ),
    ],
)
def test_every_difference_is_named(change: object, expected: str) -> None:
    mine = trainer()
    change(mine)  # type: ignore[operator]
    assert mismatches(manifest(), mine) == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2])
def test_what_goes_through_the_flat_buffer_arrives_in_its_place(
    dtype: torch.dtype, size: int
) -> None:
    torch.manual_seed(0)
    full = {name: torch.randn(shape).to(dtype) for name, (shape, _) in trainer().items()}
    for rank in range(size):
        held = manifest(rank, size, dtype_name(dtype))
        layout, num_bytes = flat_layout(held)
        assert all(item.offset % ALIGNMENT == 0 for item in layout)
        ends = [item.offset + item.num_bytes for item in layout]
        assert all(end <= item.offset for end, item in zip(ends, layout[1:], strict=False))
        assert ends[-1] <= num_bytes
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        for item, view in flat_views(buffer, layout):
            view.copy_(source_view(item, full[item.name]))
        received = buffer.clone()
        params = {e.shard.name: torch.zeros(e.shard.shape, dtype=dtype) for e in held.entries}
        for item, view in flat_views(received, layout):
            local_view(item, params[item.name]).copy_(view)
        for entry in held.entries:
            for piece in entry.shard.slices:
                expected = full[entry.shard.name].narrow(
                    piece.dim, piece.source_start, piece.length
                )
                got = params[entry.shard.name].narrow(piece.dim, piece.local_start, piece.length)
                assert torch.equal(got, expected), entry.shard.name


def test_the_digest_tells_ranks_shapes_and_dtypes_apart_but_not_devices() -> None:
    base = manifest()
    elsewhere = Manifest(0, 2, tuple(dataclasses.replace(e, device="cuda:1") for e in base.entries))
    assert elsewhere.digest() == base.digest()
    assert (
        len(
            {
                base.digest(),
                manifest(1).digest(),
                manifest(0, 1).digest(),
                manifest(dtype="float32").digest(),
            }
        )
        == 4
    )


def learned() -> Manifest:
    """A parameter of two checkpoint tensors: one column of the first, and the other transposed."""
    slices = (SourceSlice("x", (3,), 1, (2,), 0), SourceSlice("y", (2, 2), 0, (1, 2), 3))
    shard = LearnedShard("w", (7,), (("x", (3, 2)), ("y", (2, 2))), slices)
    return Manifest(0, 1, (ManifestEntry(shard, "float32", "cpu"),))


def test_a_learned_parameter_comes_back_and_is_filled_from_its_sources() -> None:
    manifest = learned()
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    trainer = {"x": ((3, 2), "bfloat16"), "y": ((2, 2), "float32")}
    assert mismatches(manifest, trainer) == [], "it has a dtype of its own"
    assert mismatches(manifest, {"x": ((2, 3), "float32"), "z": ((1,), "float32")}) == [
        "y: vLLM has it, the trainer does not",
        "z: the trainer has it, vLLM does not",
        "x: shape (2, 3) in the trainer, (3, 2) in vLLM",
    ]
    full = {"x": torch.arange(6.0).view(3, 2), "y": torch.arange(10.0, 14).view(2, 2)}
    parameter = torch.zeros(7)
    for item in flat_layout(manifest)[0]:
        local_view(item, parameter).copy_(source_view(item, full[item.slice.source]))
    assert parameter.tolist() == [1, 3, 5, 10, 12, 11, 13]


def test_a_planned_manifest_has_the_digest_of_earlier_releases() -> None:
    assert manifest().digest() == "bf82f9cae0b09ccaeb6a02f74b1b2c9d"


def test_dtype_names() -> None:
    assert parse_dtype(dtype_name(torch.bfloat16)) is torch.bfloat16
    with pytest.raises(ValueError, match="float99"):
        parse_dtype("float99")


def one(tensor: torch.Tensor, name: str = "w") -> str:
    return weights_checksum([(name, tensor)])


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.integers(1, 300),
    data=st.data(),
)
def test_any_flipped_bit_changes_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    weights = torch.randn(size).to(dtype)
    position = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    before = one(weights)
    words = weights.clone().view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    flip = 1 << bit
    if bit == 8 * dtype.itemsize - 1:
        flip = -(1 << bit)
    words[position] = words[position] ^ flip
    assert one(words.view(dtype)) != before


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 300), data=st.data())
def test_two_exchanged_weights_change_it(size: int, data: st.DataObject) -> None:
    weights = torch.randn(size)
    i, j = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = weights.clone()
    swapped[i], swapped[j] = weights[j], weights[i]
    assert (one(swapped) == one(weights)) == bool(weights[i] == weights[j])


def test_names_and_order_count() -> None:
    a, b = torch.randn(3), torch.randn(3)
    assert weights_checksum([("a", a), ("b", b)]) != weights_checksum([("b", b), ("a", a)])
    assert one(a, "a") != one(a, "b")


def test_strides_do_not_count() -> None:
    weights = torch.randn(6, 8)
    assert one(weights[:, 2:5]) == one(weights[:, 2:5].contiguous())


def test_chunks_do_not_count(monkeypatch: object) -> None:
    weights = torch.randn(1000)
    whole = one(weights)
    monkeypatch.setattr(checksum, "_CPU_CHUNK", 7)  # type: ignore[attr-defined]
    assert one(weights) == whole


@settings(max_examples=30, deadline=None)
@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    start=st.integers(0, 2**34),
)
def test_the_sums_are_those_of_the_definition(bits: list[int], start: int) -> None:
    """In Python's integers, which never overflow; the GPU's kernel computes the same."""

    def signed(value: int, width: int) -> int:
        return (value + (1 << width - 1)) % (1 << width) - (1 << width - 1)

    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    plain, weighted, _ = checksum._torch_sums(values, None, 4 * start).tolist()
    weights = [signed((start + i) * checksum.GOLDEN | 1, 32) for i in range(len(bits))]
    assert plain == sum(bits)
    assert weighted == signed(sum(x * w for x, w in zip(bits, weights, strict=True)), 64)


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
)
def test_masters_are_summed_as_what_they_are_rounded_to(
    dtype: torch.dtype, values: list[float]
) -> None:
    """Also where rounding ends in infinity, which counts as what must not be served."""
    masters = torch.tensor(values)
    before = WeightSums([("w", masters)], rounded=dtype).all()
    written = torch.empty(len(values), dtype=dtype).copy_(masters)
    assert before == WeightSums([("w", written)]).all()
    assert bool(before.not_finite) == (not bool(written.isfinite().all()))


def test_nothing_has_a_checksum_too() -> None:
    assert len(weights_checksum([])) == 32


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
