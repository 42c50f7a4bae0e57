"""Tiny random models of many architectures, as transformers makes and saves them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DENSE = SIZES | {"intermediate_size": 96}
EXPERTS = DENSE | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
WINDOW = DENSE | {"sliding_window": 16}
LATENT = (
    DENSE
    | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4}
    | {"n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    | {"v_head_dim": 16, "n_group": 1, "topk_group": 1}
)
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3": DENSE | {"head_dim": 16},
    "Llama": DENSE,
    "Olmo3": WINDOW,
    "Phi3": WINDOW | {"pad_token_id": 0},
    "Gemma2": WINDOW | {"head_dim": 16},
    "Starcoder2": WINDOW,
    "Phi": DENSE,
    "Glm4": DENSE | {"head_dim": 16, "pad_token_id": 0},
    "Qwen3Moe": EXPERTS | {"head_dim": 16},
    "Mixtral": DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": WINDOW
    | {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": LATENT | {"topk_method": "greedy"},
    "DeepseekV3": LATENT | {"topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
    "Qwen3Next": EXPERTS
    | {"num_hidden_layers": 4, "head_dim": 16, "shared_expert_intermediate_size": 32}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "Qwen2_5_VL": {
        "text_config": DENSE
        | {
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "rope_theta": 1e4,
            }
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
    },
    "Falcon": DENSE | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Mamba2": {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "expand": 2,
    },
}
"""Keys of config.json, by the first part of the configuration class's name."""

_BASE = SIZES | {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = _BASE | {"head_dim": 32}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_d_head": 32,
}
_GPT = {"vocab_size": 97, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
SERVED: dict[str, dict[str, Any]] = {
    "Apertus": _BASE,
    "Arcee": _BASE,
    "Cohere": _BASE | {"logit_scale": 0.25, "use_qk_norm": True},
    "Ernie4_5": _HEADS,
    "Exaone4": _BASE | _WINDOWED | {"sliding_window_pattern": 2},
    "ExaoneMoe": _BASE | _SPARSE | _WINDOWED,
    "FalconH1": _HEADS
    | _MAMBA
    | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "lm_head_multiplier": 0.4},
    "Gemma2": _HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 40},
    "Gemma4Text": _HEADS
    | _WINDOWED
    | {"global_head_dim": 64, "num_kv_shared_layers": 0, "tie_word_embeddings": True}
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97},
    "Glm4Moe": _HEADS
    | {"moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"use_qk_norm": True, "num_nextn_predict_layers": 0},
    "GPT2": _GPT | {"bos_token_id": 1, "eos_token_id": 2},
    "Granite": _BASE
    | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
    | {"attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True},
    "GraniteMoe": _BASE | _LOCAL | {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "GraniteMoeHybrid": _BASE
    | _LOCAL
    | _MAMBA
    | {"shared_intermediate_size": 64, "mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "HunYuanDenseV1": _HEADS,
    "Mamba2": {
        "vocab_size": 97,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Ministral3": _HEADS,
    "Nemotron": _HEADS,
    "Olmoe": _BASE | {"num_experts": 4, "num_experts_per_tok": 2},
    "OPT": {
        "vocab_size": 97,
        "hidden_size": 128,
        "ffn_dim": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 128,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
    },
    "Phi": _BASE,
    "Qwen2Moe": _BASE | _SPARSE | {"shared_expert_intermediate_size": 64},
    "SeedOss": _HEADS | {"attention_bias": True},
    "SmolLM3": _BASE | {"no_rope_layers": [1, 0]},
    "StableLm": _BASE | {"use_qkv_bias": True},
    "Starcoder2": _BASE | {"sliding_window": 16, "use_bias": True},
}
"""The same for models that vLLM's CPU build serves, and whose numbers are near 1."""
UPDATED = ("Mixtral", "Olmo3", "DeepseekV3", "Falcon", "Qwen2_5_VL")
"""Names of CONFIGS that tests serve by a running server of vLLM's CPU build, and update."""
_WIDE = _BASE | {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 2}
_WIDE_HEADS = _WIDE | {"head_dim": 64}
ON_GPUS: dict[str, dict[str, Any]] = {
    "GptOss": _WIDE_HEADS | _LOCAL | {"sliding_window": 16},
    "Jamba": _WIDE
    | {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2}
    | {"expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"mamba_d_state": 16, "mamba_dt_rank": 16, "use_mamba_kernels": False},
    "Mamba": {
        "vocab_size": 97,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "state_size": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "NemotronH": _WIDE_HEADS
    | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"]}
    | {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1}
    | {"chunk_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128}
    | {"n_group": 1, "topk_group": 1},
    "Qwen3Next": _WIDE_HEADS
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"layer_types": ["linear_attention", "full_attention"]}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    | {"shared_expert_intermediate_size": 128},
}
"""The same for models that vLLM's CPU build cannot run or update, in sizes that GPU kernels take."""

STAND_IN = Path(__file__).parent / "without_images"
"""A package with torchvision's name, which models that read images are imported with."""


def without_images() -> dict[str, str]:
    """Variables with which the stand-in is imported, if torchvision is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    return {"PYTHONPATH": os.pathsep.join((str(STAND_IN), os.environ.get("PYTHONPATH", "")))}


def make_model(name: str, folder: Path, seed: int = 0, **keys: Any) -> dict[str, torch.Tensor]:
    """Save a random float32 model. Returns the checkpoint's tensors.

    Args:
        keys: of config.json, beside the case's own.
    """
    import transformers

    config = getattr(transformers, f"{name}Config")(**CONFIGS[name] | keys)
    kind = transformers.AutoModelForCausalLM
    if "vision_config" in CONFIGS[name]:
        kind = transformers.AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = kind.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return _saved(model, folder)


def make_served(name: str, folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Save a random float32 model of SERVED or ON_GPUS. Returns the checkpoint's tensors."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**(SERVED | ON_GPUS)[name])
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return _saved(model, folder)


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {
        key: value
        for file in sorted(folder.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }
