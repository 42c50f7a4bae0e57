"""Models by shape: a config.json with the starter model's tokenizer. No weights lie on disk; both sides make their own."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from vllm_patching.sharding import ModelGeometry, plan_shards

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "assets" / "starter_model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3-1.7b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3-4b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3-8b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    "qwen2.5-14b": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "tiny": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
    },
}
"""The contents of config.json. The sizes are those of the published models of these names."""


def write_model_folder(folder: Path, shape: str) -> Path:
    """A folder that vLLM starts on with `--load-format dummy`: config.json and a tokenizer of 1,024 tokens.

    The tokenizer names fewer tokens than the model has; prompts are token ids, and a token without a name is no text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    for name in TOKENIZER_FILES:
        shutil.copy(STARTER / name, folder / name)
    return folder


def shard_shapes(shape: str, tp_rank: int = 0, tp_size: int = 1) -> list[tuple[int, ...]]:
    """The shapes of one rank's parameters; of degree 1: of the whole model."""
    geometry = ModelGeometry.from_hf_config(SHAPES[shape])
    return [spec.shape for spec in plan_shards(geometry, tp_rank, tp_size)]


def model_bytes(shape: str) -> int:
    """Bytes of all parameters in the dtype of the shape, a tied head counted once."""
    itemsize = 4 if SHAPES[shape]["torch_dtype"] == "float32" else 2
    geometry = ModelGeometry.from_hf_config(SHAPES[shape])
    return itemsize * sum(math.prod(spec.full_shape) for spec in plan_shards(geometry, 0, 1))
