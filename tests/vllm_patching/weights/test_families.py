"""The table of families: its parameters are transformers', and its reader of config.json refuses
what the decoder cannot compute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometries import config_of, geometry_of, windowless
from vllm_patching.weights.families import (
    FAMILIES,
    PROJECTIONS,
    Geometry,
    UnsupportedModel,
    adapted_projections,
    own_family,
    parameters,
)
from vllm_patching.weights.sharding import plan_shards

PLANS = Path(__file__).with_name("plans.json")
NAMES = [name.removesuffix("ForCausalLM") for name in FAMILIES]
OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a config.json that may lack any key for which transformers has a value."""
    family = draw(st.sampled_from(NAMES))
    kv_heads = draw(st.sampled_from([1, 2, 32]))
    config = config_of(
        family,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([32, 64])),
        draw(st.integers(1, 20)),
        32,
        kv_heads,
        2 if family == "Qwen2" else draw(st.sampled_from([2, 6])),
        draw(st.integers(1, 40)),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        decoder_sparse_step=draw(st.sampled_from([1, 2])),
        mlp_only_layers=draw(st.sampled_from([[], [0], [1]])),
        **windowless(family),
    )
    absent = draw(st.sets(st.sampled_from(OPTIONAL)))
    return {key: value for key, value in config.items() if key not in absent}


def checkpoint_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint that transformers makes from a config.json."""
    architecture = config["architectures"][0]
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(config))
    held = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return dict(tensor for name, shape in held.items() for tensor in stored(name, shape))


def stored(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that transformers stores of a parameter: experts are stored one by one."""
    path, experts, projection = name.partition(".experts.")
    if not experts:
        yield name, shape
        return
    count, rows, columns = shape
    for expert in range(count):
        own = f"{path}.experts.{expert}"
        if projection == "down_proj":
            yield f"{own}.down_proj.weight", (rows, columns)
        else:
            yield f"{own}.gate_proj.weight", (rows // 2, columns)
            yield f"{own}.up_proj.weight", (rows // 2, columns)


@settings(max_examples=60, deadline=None)
@given(configs())
def test_the_checkpoint_is_transformers(config: dict[str, Any]) -> None:
    planned = parameters(Geometry.from_config(config)).values()
    tensors = {tensor.name: tensor.shape for one in planned for tensor in one.tensors}
    assert tensors == checkpoint_of(config)


def test_qwen3_has_heads_of_128_and_a_bias_in_o_proj() -> None:
    """Neither of two readers had both: 128 is Qwen3's own default, and `attention_bias` is of all
    four projections."""
    config = config_of("Qwen3", 1, 64, 80, 2, 1, 0, 97, attention_bias=True)
    del config["head_dim"]
    geometry = Geometry.from_config(config)
    assert (geometry.head_dim, geometry.qkv_bias, geometry.o_bias) == (128, True, True)
    bias = "model.layers.0.self_attn.o_proj.bias"
    assert checkpoint_of(config)[bias] == parameters(geometry)[bias].shape == (64,)


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ((32, 4096, 14336, 32, 8, 128, 32768), 7_248_023_552),
        ((40, 5120, 32768, 32, 8, 128, 131072), 23_572_403_200),
    ],
    ids=["Mistral-7B-v0.3", "Mistral-Small-24B-2501"],
)
def test_mistral_has_as_many_parameters_as_its_page_states(
    sizes: tuple[int, ...], elements: int
) -> None:
    geometry = geometry_of("Mistral", *sizes, sliding_window=None)
    assert sum(parameter.size for parameter in parameters(geometry).values()) == elements


MIXTURE = (3, 64, 80, 4, 2, 16, 97)


def test_the_experts_of_a_layer_are_stacked_as_vllm_stacks_them() -> None:
    geometry = geometry_of("Qwen3Moe", *MIXTURE, mlp_only_layers=[1], moe_intermediate_size=24)
    assert geometry.sparse_layers == (0, 2)
    planned = parameters(geometry)
    fused = planned["model.layers.0.mlp.experts.w13_weight"]
    assert fused.shape == (4, 48, 64)
    assert planned["model.layers.0.mlp.experts.w2_weight"].shape == (4, 64, 24)
    assert planned["model.layers.0.mlp.gate.weight"].shape == (4, 64)
    assert planned["model.layers.1.mlp.gate_up_proj.weight"].shape == (160, 64)
    whole = torch.arange(fused.size).view(fused.shape)
    views = {part.name: part.view(whole) for part in fused.tensors}
    up = views["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert torch.equal(up, whole[2, 24:])
    assert torch.equal(torch.cat(list(views.values())).view(fused.shape), whole)


def test_qwen3_30b_a3b_has_as_many_parameters_as_its_page_states() -> None:
    geometry = geometry_of(
        "Qwen3Moe",
        *(48, 2048, 6144, 32, 4, 128, 151936),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    planned = parameters(geometry).values()
    assert sum(one.size for one in planned) == 30_532_122_624
    # 3.3B: the layers' products for one token, the embedding and the output matrix.
    active = sum(one.multiplied for one in planned) + 2 * 151936 * 2048
    assert round(active / 1e9, 2) == 3.35


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_keys(key: str) -> None:
    config = config_of("Qwen3Moe", *MIXTURE)
    del config["num_experts"]
    assert Geometry.from_config(config).num_experts == 128
    assert Geometry.from_config(config | {key: 6}).num_experts == 6
    dense = Geometry.from_config(config | {key: 0})
    assert (dense.num_experts, dense.sparse_layers) == (0, ())
    assert "model.layers.2.mlp.gate_up_proj.weight" in parameters(dense)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and a layer has 4 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, and a layer has 4 experts"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        geometry_of("Qwen3Moe", *MIXTURE, **keys)


def test_gemma_reads_the_older_keys_and_the_newer_ones_alike() -> None:
    sizes = (7, 8, 6, 4, 2, 2, 10)
    older = geometry_of("Gemma3", *sizes, rope_theta=3e6, rope_local_base_freq=2e4)
    newer = geometry_of(
        "Gemma3",
        *sizes,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert older == newer
    assert older.windows == (4096,) * 5 + (None, 4096)
    assert (older.rope_theta, older.local_rope_theta) == (3e6, 2e4)
    assert older.attention_scale == 256**-0.5


WINDOWS: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    ("Mistral", {"sliding_window": 20}, (20, 20, 20)),
    ("Mistral", {"sliding_window": None}, ()),
    ("Mistral", {"sliding_window": 64}, ()),
    ("Mistral", {}, ()),
    ("Mistral", {"max_position_embeddings": 8192}, (4096, 4096, 4096)),
    ("Qwen2", {"sliding_window": 20}, ()),
    ("Qwen2", {"sliding_window": 20, "use_sliding_window": True}, ()),
    (
        "Qwen2",
        {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1},
        (None, 20, 20),
    ),
    ("Qwen3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}, ()),
    (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (20, None, 20),
    ),
]


@pytest.mark.parametrize(("family", "keys", "windows"), WINDOWS)
def test_the_layers_with_a_window_are_transformers(
    family: str, keys: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """A window that hides no position of the model (64 here) is none."""
    geometry = geometry_of(family, 3, 8, 6, 4, 2, 2, 10, **keys)
    assert geometry.windows == windows
    assert [geometry.window(layer) for layer in range(3)] == list(windows or [None] * 3)


def test_parts_of_a_parameter_lie_one_below_the_other() -> None:
    planned = parameters(geometry_of("Qwen2", 1, 8, 6, 4, 2, 2, 10))
    qkv = planned["model.layers.0.self_attn.qkv_proj.bias"]
    assert [(part.projection, part.start, part.stop) for part in qkv.parts] == [
        ("q_proj", 0, 8),
        ("k_proj", 8, 12),
        ("v_proj", 12, 16),
    ]
    assert (qkv.shape, qkv.size, qkv.adapted) == ((16,), 16, False)


def test_a_fused_tensor_is_split_by_its_projections_and_adapted_as_a_whole() -> None:
    geometry = geometry_of("Phi3", 1, 8, 6, 4, 2, 2, 10)
    qkv = parameters(geometry)["model.layers.0.self_attn.qkv_proj.weight"]
    assert [(part.start, part.stop, part.split) for part in qkv.parts] == [
        (0, 8, "rows"),
        (8, 12, "kv_heads"),
        (12, 16, "kv_heads"),
    ]
    assert [(tensor.name, tensor.shape) for tensor in qkv.tensors] == [(qkv.name, (16, 8))]
    assert adapted_projections(geometry, PROJECTIONS) == (
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    )
    assert adapted_projections(geometry, ("k_proj", "down_proj")) == ("qkv_proj", "down_proj")


def test_the_table_answers_that_it_has_no_row() -> None:
    assert own_family({"architectures": ["MixtralForCausalLM"]}) is None
    assert own_family({}) is None
    assert own_family({"architectures": ["Qwen3ForCausalLM"]}) is FAMILIES["Qwen3ForCausalLM"]


def test_every_projection_of_a_layer_can_have_an_adapter() -> None:
    assert PROJECTIONS == (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    adapted = [
        p.name for p in parameters(geometry_of("Qwen3", 1, 8, 6, 4, 2, 2, 10)).values() if p.adapted
    ]
    assert adapted == [
        f"model.layers.0.{name}.weight"
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not"),
        ({"architectures": None}, r"architecture none named \(model_type 'qwen3'\) is not"),
        ({"vocab_size": None}, "no 'vocab_size', which Qwen3ForCausalLM needs"),
        ({"partial_rotary_factor": 0.5}, "0.5 is not supported for Qwen3ForCausalLM"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"quantization_config": {"bits": 4}}, "a quantised checkpoint cannot be trained"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for Qwen3ForCausalLM"),
        ({"layer_types": ["sliding_attention"]}, "but the window is off"),
        ({"layer_types": ["chunked_attention"]}, "layer_types has 1 entries of chunked_attention"),
        (
            {"layer_types": ["full_attention"] * 2},
            "layer_types has 2 entries of full_attention for 1 layers",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "sliding_window": 9},
            r"LlamaForCausalLM has no sliding-window attention .* \(it is 9\)",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping 30.0 is not supported for Gemma3ForCausalLM",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "silu"},
            "hidden_activation 'silu' is not supported for Gemma3ForCausalLM",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}},
            },
            "rope scaling 'yarn' of layers with a sliding window is not supported",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rope scaling 'dynamic' is not supported"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "Take a model without it, such as microsoft/phi-4",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' lacks original_max_position"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4}}, "lacks low_freq_factor, high"),
    ],
)
def test_an_unsupported_model_is_refused_by_the_file_and_the_key(
    changes: dict[str, Any], message: str
) -> None:
    config = config_of("Qwen3", 1, 8, 6, 4, 2, 2, 10) | changes
    with pytest.raises(UnsupportedModel, match=f"^here: .*{message}|^here has {message}"):
        Geometry.from_config(config, "here")


def digest(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]


@pytest.mark.parametrize("case", json.loads(PLANS.read_text()), ids=lambda case: case["name"])
def test_the_plans_are_those_of_the_code_before_the_table(case: dict[str, Any]) -> None:
    """Digests of the checkpoint's tensors, and of the slices of every rank, as two separate modules
    computed them. Servers and trainers compare these plans, so they must not change."""
    geometry = geometry_of(case["family"], *case["sizes"], **case["keys"])
    assert case["checkpoint"] == digest(
        [
            [name, [[part.name, part.start, part.shape] for part in parameter.parts]]
            for name, parameter in parameters(geometry).items()
        ]
    )
    for degree, expected in case["shards"].items():
        ranks = range(int(degree))
        plans = [plan_shards(geometry, rank, len(ranks)) for rank in ranks]
        assert digest([[asdict(spec) for spec in plan] for plan in plans]) == expected
