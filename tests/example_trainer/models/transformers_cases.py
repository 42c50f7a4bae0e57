"""Tiny random models of architectures that have no row in the table of families."""

from __future__ import annotations

import atexit
import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from tests.tiny_models import SERVED

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}
_MEDIA_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
CONFIGS: dict[str, dict[str, Any]] = {
    # Sliding windows in one layer, none in the other; queries share keys.
    "Cohere2": _SIZES
    | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    | {"logit_scale": 0.5},
    # Sinks of attention.
    "GptOss": _SIZES
    | {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    # A sliding window, a cap on the scores of attention, and one on the logits.
    "Gemma2": _SIZES | {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 0.5},
    # Heads of one width in some layers and of another in others; embeddings of each layer.
    "Gemma4Text": _SIZES
    | {"head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "num_kv_shared_layers": 0}
    | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
    # A tied matrix, and a factor of the logits.
    "Cohere": _SIZES | {"logit_scale": 0.25, "tie_word_embeddings": True},
    # Positions that are learned; rows of media positions give it hidden states of another shape.
    "BioGpt": _SIZES,
    # Positions that are learned, and tensors whose names look like ignored ones.
    "GPT2": {
        "vocab_size": 97,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    # A recurrent layer and one of attention, both with experts.
    "Qwen3Next": _SIZES
    | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    | {"num_experts": 4, "num_experts_per_tok": 2}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    # A recurrent layer whose norm takes a gate, one of attention, and one of experts.
    "NemotronH": _SIZES
    | {"head_dim": 8, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"]}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
    | {"chunk_size": 8}
    | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    # Hidden states in float32, whatever the dtype of the weights.
    "Mamba2": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "tie_word_embeddings": True,
    },
    # The model below the head holds a factor of the logits.
    "FalconH1": _SIZES
    | {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
    | {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    | {"lm_head_multiplier": 0.4},
    # A mixture of experts.
    "Mixtral": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # Latent attention, a dense layer, one of experts, and a buffer that checkpoints hold.
    "DeepseekV3": _SIZES
    | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4}
    | {"n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    | {"v_head_dim": 8, "n_group": 1, "topk_group": 1},
    # Embeddings are scaled in their own memory.
    "CTRL": {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "dff": 48}
    | {"n_layer": 2, "n_head": 4},
    # A vision tower beside the text part.
    "Qwen2_5_VL": {
        "text_config": _SIZES | {"rope_parameters": _MEDIA_ROPE},
        "vision_config": _VISION,
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    },
}
"""Keys of config.json, by the first part of the names of transformers' classes."""
SAMPLE = ("GptOss", "Qwen3Next", "Qwen2_5_VL")
"""Names of CONFIGS that the default tier tries: experts and sinks, recurrent layers, and images."""


BLOCKS = (
    _SIZES
    | {"head_dim": 8, "num_key_value_heads": 1, "moe_intermediate_size": 16, "n_routed_experts": 4}
    | {"n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 12, "o_lora_rank": 16}
    | {"o_groups": 4, "index_n_heads": 8, "index_head_dim": 8, "index_topk": 64}
    | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}
    | {"compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}}
    | {"mlp_layer_types": ["hash_moe", "moe"], "sliding_window": 8, "partial_rotary_factor": 0.5}
)
"""Keys of a DeepseekV4 with blocks of keys, counted along a row, and a table of ids in each
checkpoint. Transformers does not forward it in bfloat16 on a CPU."""


@cache
def checkpoint(name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model once for all tests of this process; return its folder.

    Args:
        name: of CONFIGS, DeepseekV4, or of the models that vLLM serves in tests.
    """
    import transformers

    torch.manual_seed(sum(name.encode()))
    keys = (CONFIGS | {"DeepseekV4": BLOCKS}).get(name) or SERVED[name]
    config = getattr(transformers, f"{name}Config")(**keys)
    kind = transformers.AutoModelForCausalLM
    if "vision_config" in keys:
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    folder = Path(mkdtemp(prefix=f"transformers-{name}-"))
    atexit.register(_remove, folder, os.getpid())
    model.save_pretrained(folder)
    return folder


def _remove(folder: Path, owner: int) -> None:
    """Remove a folder at the end of the process that made it, and not at a forked child's end."""
    if os.getpid() == owner:
        shutil.rmtree(folder)
