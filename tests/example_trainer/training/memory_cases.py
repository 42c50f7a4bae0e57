"""Sizes of models and requests that the tests of the memory plan share."""

from __future__ import annotations

import torch

from example_trainer.training.memory_plan import MemoryRequest
from tests.example_trainer.training.model_configs import MODEL_CONFIGS
from vllm_patching.weights.families import Geometry


def geometry(**changes: object) -> Geometry:
    values = {
        "architecture": "Qwen3ForCausalLM", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_layers": 4,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "max_positions": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "qk_norm": True, "tie_word_embeddings": True,
    }  # fmt: skip
    return Geometry(**(values | changes))  # type: ignore[arg-type]


def qwen_14b() -> Geometry:
    """Qwen2.5-14B's sizes."""
    return Geometry.from_config(MODEL_CONFIGS["Qwen/Qwen2.5-14B-Instruct"])


def qwen_7b() -> Geometry:
    """Qwen2.5-7B's sizes."""
    return Geometry.from_config(MODEL_CONFIGS["Qwen/Qwen2.5-7B-Instruct"])


def request(**changes: object) -> MemoryRequest:
    values = {
        "geometry": geometry(),
        "dtype": torch.bfloat16,
        "tokens_per_microbatch": 512,
        "seq_len": 256,
    }
    return MemoryRequest(**(values | changes))  # type: ignore[arg-type]
