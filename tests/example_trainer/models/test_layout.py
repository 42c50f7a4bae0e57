"""Parameters in vLLM's layout and checkpoint tensors are two views of the same numbers, for any
geometry.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example_trainer.models import Decoder
from example_trainer.models.hf_checkpoint import hf_tensors, read_weights, save_model
from vllm_patching.weights.families import Geometry, parameters


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kv_heads = draw(st.integers(1, 3))
    architecture = draw(
        st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    )
    llama, qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
    return Geometry(
        architecture=architecture,
        vocab_size=draw(st.integers(1, 40)),
        hidden_size=draw(st.integers(1, 12)),
        intermediate_size=draw(st.integers(1, 20)),
        num_layers=draw(st.integers(0, 3)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        max_positions=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        qkv_bias=not qwen3 and (not llama or draw(st.booleans())),
        o_bias=llama and draw(st.booleans()),
        mlp_bias=llama and draw(st.booleans()),
        qk_norm=qwen3,
        tie_word_embeddings=draw(st.booleans()),
    )


@given(geometries())
def test_parts_tile_every_parameter_and_no_tensor_is_used_twice(geometry: Geometry) -> None:
    plan = {name: planned.parts for name, planned in parameters(geometry).items()}
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in Decoder(geometry, torch.float32).named_parameters()
    }
    assert set(plan) == set(shapes)
    for name, parts in plan.items():
        assert [part.start for part in parts] == [0, *[part.stop for part in parts[:-1]]]
        assert parts[-1].stop == shapes[name][0]
        assert all(part.shape[1:] == shapes[name][1:] for part in parts)
    names = [part.name for parts in plan.values() for part in parts]
    assert len(names) == len(set(names))


@settings(deadline=None, max_examples=25)
@given(
    geometry=geometries(), seed=st.integers(0, 2**31), shard_bytes=st.sampled_from([1, 300, 10**9])
)
def test_saving_and_reading_back_is_exact(geometry: Geometry, seed: int, shard_bytes: int) -> None:
    torch.manual_seed(seed)
    model = Decoder(geometry, torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    again = Decoder(geometry, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder), max_shard_bytes=shard_bytes)
        read_weights(again, Path(folder))
    for (name, one), (_, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


@given(geometries())
def test_qkv_rows_are_queries_then_keys_then_values(geometry: Geometry) -> None:
    model = Decoder(geometry, torch.float32)
    tensors = dict(hf_tensors(geometry, torch.float32, model.named_parameters()))
    for i, layer in enumerate(model.model.layers):
        parts = [tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"] for name in "qkv"]
        assert [len(part) for part in parts] == [
            geometry.q_size,
            geometry.kv_size,
            geometry.kv_size,
        ]
        assert torch.equal(
            torch.cat(parts).nan_to_num(), layer.self_attn.qkv_proj.weight.nan_to_num()
        )
        gate_up = torch.cat(
            [tensors[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        )
        assert torch.equal(gate_up.nan_to_num(), layer.mlp.gate_up_proj.weight.nan_to_num())
