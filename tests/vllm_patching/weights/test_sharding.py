"""Shards of every supported architecture: they rebuild the full tensors, and nothing else fits in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example_trainer.models.shards import Split
from example_trainer.parallel.tensor import TensorParallelShards
from tests.geometries import geometry_of, windowless
from vllm_patching.weights.families import FAMILIES, Geometry, UnsupportedModel
from vllm_patching.weights.sharding import VOCAB_PADDING, ShardSpec, plan_shards, source_slices

TP_SIZES = (1, 2, 4, 8)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    family = draw(st.sampled_from([name.removesuffix("ForCausalLM") for name in FAMILIES]))
    return geometry_of(
        family,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([8, 24])),
        8 * draw(st.integers(1, 4)),
        8 * draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.sampled_from([2, 4])),
        draw(st.integers(1, 700)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=8 * draw(st.integers(1, 2)),
        decoder_sparse_step=draw(st.integers(1, 2)),
        **windowless(family),
    )


def full_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.full_shape for spec in plan_shards(geometry, 0, 1)}


def distinct(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape)


@settings(max_examples=60, deadline=None)
@given(geometry=geometries(), tp_size=st.sampled_from(TP_SIZES))
def test_shards_rebuild_the_full_tensors(geometry: Geometry, tp_size: int) -> None:
    full = {name: distinct(shape) for name, shape in full_shapes(geometry).items()}
    rebuilt = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    for rank in range(tp_size):
        specs = plan_shards(geometry, rank, tp_size)
        assert [spec.name for spec in specs] == list(full)
        for spec in specs:
            local = torch.zeros(spec.shape, dtype=torch.float64)
            for piece in spec.slices:
                source = full[spec.name].narrow(piece.dim, piece.source_start, piece.length)
                target = local.narrow(piece.dim, piece.local_start, piece.length)
                assert not target.any(), f"{spec.name}: two slices write the same place"
                target.copy_(source)
            for piece in spec.slices:
                back = rebuilt[spec.name].narrow(piece.dim, piece.source_start, piece.length)
                back.copy_(local.narrow(piece.dim, piece.local_start, piece.length))
            # Only the padded rows of the vocabulary may stay empty.
            if "embed_tokens" not in spec.name and "lm_head" not in spec.name:
                assert local.all(), f"{spec.name}: part of rank {rank} comes from nowhere"
    for name, tensor in full.items():
        assert torch.equal(rebuilt[name], tensor), name


@settings(max_examples=30, deadline=None)
@given(geometry=geometries(), tp_size=st.sampled_from(TP_SIZES))
def test_a_rank_holds_whole_heads_in_the_order_q_k_v(geometry: Geometry, tp_size: int) -> None:
    g = geometry
    head_of_row = [("q", h) for h in range(g.num_heads)] + [
        (c, h) for c in "kv" for h in range(g.num_kv_heads)
    ]
    for rank in range(tp_size):
        spec = next(s for s in plan_shards(g, rank, tp_size) if s.name.endswith("qkv_proj.weight"))
        rows = [piece.source_start + i for piece in spec.slices for i in range(piece.length)]
        heads = [head_of_row[row // g.head_dim] for row in rows[:: g.head_dim]]
        queries = [head for kind, head in heads if kind == "q"]
        assert queries == [rank * g.num_heads // tp_size + i for i in range(g.num_heads // tp_size)]
        keys = [head for kind, head in heads if kind == "k"]
        assert keys == [head for kind, head in heads if kind == "v"]
        # Grouped-query attention: the key head of each query head must be on the same rank.
        assert set(keys) == {query // (g.num_heads // g.num_kv_heads) for query in queries}


def mixture(**keys: Any) -> Geometry:
    """One layer with experts whose inner width is not the dense layers'."""
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return geometry_of("Qwen3Moe", 1, 10, 9, 8, 8, 2, 65, **windowless("Qwen3Moe") | sizes | keys)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_slices_of_experts_fill_a_rank_in_the_order_of_its_memory(tp_size: int) -> None:
    geometry = mixture()
    experts = "model.layers.0.mlp.experts"
    for rank in range(tp_size):
        specs = {spec.name: spec for spec in plan_shards(geometry, rank, tp_size)}
        mine = slice(rank * 8 // tp_size, (rank + 1) * 8 // tp_size)
        w13 = distinct((6, 2, 8, 10))
        expected = w13[:, :, mine].reshape(6, -1, 10)
        assert_filled(specs[f"{experts}.w13_weight"], w13.view(6, 16, 10), expected)
        w2 = distinct((6, 10, 8))
        assert_filled(specs[f"{experts}.w2_weight"], w2, w2[:, :, mine])


def assert_filled(spec: ShardSpec, full: torch.Tensor, expected: torch.Tensor) -> None:
    """One slice has all of the rank's values; its first dimension counts the experts."""
    (piece,) = source_slices(spec)
    values = full.contiguous().as_strided(piece.shape, piece.source_strides, piece.source_offset)
    assert (piece.local_start, piece.shape[0]) == (0, full.shape[0])
    assert spec.shape == expected.shape
    assert torch.equal(values.reshape(spec.shape), expected)


def test_what_experts_cannot_be_split_over_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="6 experts over 8 tensor-parallel ranks"):
        plan_shards(mixture(), 0, 8)
    with pytest.raises(UnsupportedModel, match="split experts with an inner width of 5 over 2 "):
        plan_shards(mixture(moe_intermediate_size=5), 0, 2)
    with pytest.raises(UnsupportedModel, match="split a feed-forward width of 9 over 2 "):
        plan_shards(mixture(mlp_only_layers=[0]), 0, 2)


def test_the_vocabulary_is_padded_before_it_is_split() -> None:
    geometry = geometry_of("Qwen2", 1, 8, 8, 8, 8, 2, 65)
    rows = [
        next(s for s in plan_shards(geometry, rank, 2) if s.name == "lm_head.weight")
        for rank in range(2)
    ]
    assert [spec.shape[0] for spec in rows] == [VOCAB_PADDING, VOCAB_PADDING]
    assert [[piece.length for piece in spec.slices] for spec in rows] == [[64], [1]]


def test_a_tied_head_is_no_parameter_of_its_own() -> None:
    sizes = (1, 8, 8, 2, 1, 4, 10)
    tied = geometry_of("Qwen3", *sizes, tie_word_embeddings=True)
    assert "lm_head.weight" not in full_shapes(tied)
    assert "lm_head.weight" in full_shapes(geometry_of("Qwen3", *sizes))


def test_qwen25_14b_has_339_parameters() -> None:
    """48 layers x 7 parameters (the qkv bias included), the embedding, the head and the last norm."""
    shapes = full_shapes(geometry_of("Qwen2", 48, 5120, 13824, 40, 8, 128, 152064))
    assert len(shapes) == 339
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (5120 + 2 * 1024, 5120)


def test_what_cannot_be_split_is_refused_by_name() -> None:
    geometry = geometry_of("Qwen3", 1, 8, 9, 6, 3, 2, 10)
    with pytest.raises(UnsupportedModel, match=r"6 attention heads.*width of 9 over 4"):
        plan_shards(geometry, 0, 4)
    with pytest.raises(ValueError, match="tp_rank 2"):
        plan_shards(geometry, 2, 2)


def test_a_trainers_ranks_hold_experts_as_vllms_ranks_do() -> None:
    """The inner width of each expert is split; each rank has the whole router."""
    kinds = TensorParallelShards(mixture(), Split(1, 2, None)).kinds
    own = {name.rpartition("mlp.")[2]: kind for name, kind in kinds.items() if ".mlp." in name}
    assert own["experts.w13_weight"] == own["experts.w2_weight"] == "split"
    assert own["gate.weight"] == "partial"
