"""Small models for tests: config.json, and the sizes that are read from it."""

from __future__ import annotations

from typing import Any

from vllm_patching.weights.families import Geometry

_MODEL_TYPES = {"Gemma3": "gemma3_text", "Qwen3Moe": "qwen3_moe"}


def config_of(
    family: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    **keys: Any,
) -> dict[str, Any]:
    """Return the config.json of a model of a family such as `Qwen3`, with more `keys`."""
    sizes = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": _MODEL_TYPES.get(family, family.lower()),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
    if family == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
    return sizes | keys


def windowless(family: str) -> dict[str, Any]:
    """Return the keys that give a family no sliding window; Gemma always has one."""
    return {} if family == "Gemma3" else {"sliding_window": None}


def geometry_of(family: str, *sizes: int, **keys: Any) -> Geometry:
    """Return the geometry of the model; see `config_of`."""
    return Geometry.from_config(config_of(family, *sizes, **keys))
