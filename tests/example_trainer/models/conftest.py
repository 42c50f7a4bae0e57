"""Tiny checkpoints with random weights, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}

_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
"""Some families' own are outside the small vocabulary."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen2-untied-mha": (
        "Qwen2",
        {"tie_word_embeddings": False, "num_key_value_heads": 4, "vocab_size": 131},
    ),
    "qwen3-tied-mqa": (
        "Qwen3",
        {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1},
    ),
    "qwen3-untied": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 20}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-llama3": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE, "head_dim": 16},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ),
    "mistral-untied": ("Mistral", {"sliding_window": None}),
    "mistral-wide-heads": (
        "Mistral",
        {
            "sliding_window": None,
            "head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 37}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
    ),
    "qwen3-window-yarn": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 37,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 32,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "llama-yarn-own-bounds": (
        "Llama",
        {
            "rope_parameters": YARN_ROPE
            | {"beta_fast": 6.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 0.8}
        },
    ),
    "phi3-partial-rotary": (
        "Phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 25e4,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "glm4": (
        "Glm4",
        {"head_dim": 16, "rms_norm_eps": 1e-5, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "glm4-no-bias-three-quarters": (
        "Glm4",
        {
            "head_dim": 24,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": YARN_ROPE | {"rope_type": "default", "partial_rotary_factor": 0.75},
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-biases-yarn": (
        "Olmo2",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "sliding_window": 37,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3-untied-scaled": (
        "Gemma3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-dense-layers": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi3-window": ("Phi3", {"sliding_window": 37}),
    "llama-biases": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        },
    ),
}


def config_class_of(family: str) -> Any:
    """transformers' class of a family's config."""
    return getattr(transformers, f"{family}ForCausalLM").config_class


MakeCheckpoint = Callable[..., tuple[Path, torch.nn.Module]]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """make(case, **save_pretrained options) -> (folder, the transformers model it was saved from)."""

    def make(
        case: str, dtype: torch.dtype = torch.float32, **save_options: Any
    ) -> tuple[Path, torch.nn.Module]:
        family, changes = CASES[case]
        config_class = config_class_of(family)
        config = config_class(**{**_SIZES, **_SPECIAL_TOKENS, **changes})
        torch.manual_seed(7)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in (
                model.parameters()
            ):  # norms and biases start constant: make every one of them matter
                parameter.add_(0.2 * torch.randn_like(parameter))
        model = model.to(dtype).eval()
        folder = tmp_path / case
        model.save_pretrained(folder, **save_options)
        return folder, model

    return make
