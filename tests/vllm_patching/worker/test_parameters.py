"""A worker refuses a model whose parameters are not the planned ones, and names them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.fleet_server import module_of
from tests.geometries import geometry_of
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import plan_shards
from vllm_patching.worker.parameters import LayoutError, build_manifest, own_parameters


def parameters_of(geometry: Geometry, rank: int = 0, size: int = 1) -> dict[str, nn.Parameter]:
    plan = plan_shards(geometry, rank, size)
    return {spec.name: nn.Parameter(torch.zeros(spec.shape)) for spec in plan}


def test_the_manifest_has_the_plan_of_the_rank() -> None:
    geometry = geometry_of("Qwen3", 2, 12, 8, 4, 2, 3, 70)
    manifest = build_manifest(geometry, parameters_of(geometry, 1, 2), 1, 2)
    assert (manifest.tp_rank, manifest.tp_size) == (1, 2)
    assert [entry.shard for entry in manifest.entries] == plan_shards(geometry, 1, 2)
    assert {(entry.dtype, entry.device) for entry in manifest.entries} == {("float32", "cpu")}


def test_a_bias_that_vllm_leaves_out_is_named() -> None:
    """As of a Qwen3 with `attention_bias`, whose o_proj.bias vLLM's loader ignores."""
    geometry = geometry_of("Qwen3", 1, 12, 8, 4, 2, 3, 70, attention_bias=True)
    built = parameters_of(geometry)
    del built["model.layers.0.self_attn.o_proj.bias"]
    with pytest.raises(
        LayoutError,
        match=r"^rank 0: 1 of 13 parameters cannot be mapped: model\.layers\.0\.self_attn\.o_proj\."
        r"bias is planned but vLLM has no such parameter$",
    ):
        build_manifest(geometry, built, 0, 1)


def test_every_difference_is_named() -> None:
    geometry = geometry_of("Llama", 1, 12, 8, 4, 2, 3, 70)
    built = parameters_of(geometry)
    built["model.norm.weight"] = nn.Parameter(torch.zeros(13))
    built["model.extra.weight"] = nn.Parameter(torch.zeros(1))
    built["lm_head.weight"] = nn.Parameter(torch.zeros(12, 128).T)
    with pytest.raises(LayoutError) as caught:
        build_manifest(geometry, built, 0, 1)
    assert str(caught.value) == (
        "rank 0: 3 of 9 parameters cannot be mapped: lm_head.weight is not contiguous in vLLM; "
        "model.extra.weight is in vLLM but not planned; "
        "model.norm.weight is planned as (12,), vLLM has (13,)"
    )


def test_wrapped_layers_and_a_tied_head_have_the_plans_names() -> None:
    geometry = geometry_of("Qwen3", 1, 12, 8, 4, 2, 3, 70, tie_word_embeddings=True)
    built = {
        name.replace("_proj.", "_proj.base_layer."): parameter.data
        for name, parameter in parameters_of(geometry).items()
    }
    model = module_of(built)
    model.lm_head = nn.Module()
    model.lm_head.weight = model.get_parameter("model.embed_tokens.weight")
    assert build_manifest(geometry, own_parameters(model), 0, 1).entries
    model.lm_head.weight = nn.Parameter(torch.zeros(128, 12))
    with pytest.raises(LayoutError, match=r"lm_head\.weight is in vLLM but not planned"):
        build_manifest(geometry, own_parameters(model), 0, 1)


def test_the_module_of_experts_weights_is_not_in_their_names() -> None:
    geometry = geometry_of(
        "Qwen3Moe",
        1,
        12,
        8,
        4,
        2,
        3,
        70,
        num_experts=4,
        moe_intermediate_size=6,
        num_experts_per_tok=2,
    )
    built = {
        name.replace(".experts.", ".experts.base_layer.routed_experts."): parameter.data
        for name, parameter in parameters_of(geometry).items()
    }
    assert build_manifest(geometry, own_parameters(module_of(built)), 0, 1).entries
