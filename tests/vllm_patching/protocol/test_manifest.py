"""Manifests: exact round trip, every kind of difference is named, and the flat layout is a
bijection.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.geometries import geometry_of
from vllm_patching.protocol.manifest import (
    ALIGNMENT,
    Manifest,
    ManifestEntry,
    dtype_name,
    flat_layout,
    flat_views,
    local_view,
    mismatches,
    parse_dtype,
    source_view,
)
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
