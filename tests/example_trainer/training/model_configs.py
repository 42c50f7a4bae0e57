"""config.json of the models that the pages name, as far as the memory plan reads it.

The sizes are published facts.
"""

from __future__ import annotations

from typing import Any


def _qwen2(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int = 152064,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return _qwen2(hidden, inner, layers, heads, 8, 151936, tied) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }


MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B-Instruct": _qwen2(5120, 13824, 48, 40, 8),
    "Qwen/Qwen2.5-72B-Instruct": _qwen2(8192, 29568, 80, 64, 8),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-30B-A3B": _qwen3(2048, 6144, 48, 32, tied=False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
PARAMETERS = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9, "Qwen/Qwen2.5-3B": 3.09e9, "Qwen/Qwen2.5-3B-Instruct": 3.09e9,
    "Qwen/Qwen2.5-7B-Instruct": 7.62e9, "Qwen/Qwen2.5-14B-Instruct": 14.77e9, "Qwen/Qwen2.5-72B-Instruct": 72.7e9,
    "Qwen/Qwen3-1.7B": 1.72e9, "Qwen/Qwen3-8B": 8.19e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
}  # fmt: skip
"""Parameters of each, as its page on the hub states them (a tied output matrix counted once)."""
