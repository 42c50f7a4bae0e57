"""Models by shape: a config.json with the starter model's tokenizer.

No weights lie on disk; both sides make their own.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from vllm_patching.weights.families import Geometry, parameters
from vllm_patching.weights.sharding import plan_shards

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "assets" / "starter_model"
PEAK_FLOPS = 790e12
"""Dense bf16 rate of an H200, measured by large matrix products; what every share of the peak in
bench/ is of."""
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
    "torch_dtype": "bfloat16",
}


def _qwen3(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    vocab: int = 151936,
    tied: bool = True,
) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "attention_bias": False,
    }


def _qwen2(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int = 8,
    vocab: int = 152064,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    experts: int,
    chosen: int,
    **sizes: Any,
) -> dict[str, Any]:
    """Return a Qwen3 without dense layers; `inner` is the width of an expert."""
    dense = _qwen3(hidden, 3 * hidden, layers, heads, kv_heads, **sizes)
    return dense | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_LAYERS_OF_30B = {"": 48, "-24l": 24, "-12l": 12, "-6l": 6, "-5l": 5, "-4l": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, tied=False),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64),
    "phi4-8l": _qwen2(5120, 17920, 8, 40, 10, 100352)
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_theta": 25e4},
    "glm4-9b-8l": _qwen3(4096, 13696, 8, 32, 2, vocab=151552, tied=False)
    | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True}
    | {"partial_rotary_factor": 0.5, "rope_theta": 1e4},
    **{
        f"qwen3-30b-a3b{ending}": _qwen3_moe(2048, 768, layers, 32, 4, 128, 8, tied=False)
        for ending, layers in _LAYERS_OF_30B.items()
    },
    "100mb": _qwen3(512, 1536, 5, 8, 4, 64, 16384) | {"torch_dtype": "float32"},
    "tiny": _qwen3(128, 192, 2, 2, 2, 64, 1024) | {"torch_dtype": "float32"},
    "tiny-mixture": _qwen3_moe(128, 64, 2, 2, 2, 8, 2, head_dim=64, vocab=1024)
    | {"torch_dtype": "float32"},
}
"""The contents of config.json. The sizes are the published ones, but `8l` has 8 layers, and so on."""


def tiny_of(shape: str) -> str:
    """Return the key of a tiny model of the same kind, dense or a mixture."""
    if "num_experts" in SHAPES[shape]:
        return "tiny-mixture"
    return "tiny"


def write_model_folder(folder: Path, shape: str, positions: int = 4096) -> Path:
    """A folder that vLLM starts on with `--load-format dummy`: config.json and a tokenizer of 1,024
    tokens.

    The tokenizer names fewer tokens than the model has; prompts are token ids, and a token without
    a name has no text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(SHAPES[shape] | {"max_position_embeddings": positions}, indent=1)
    )
    for name in TOKENIZER_FILES:
        shutil.copy(STARTER / name, folder / name)
    return folder


def shard_shapes(shape: str, tp_rank: int = 0, tp_size: int = 1) -> list[tuple[int, ...]]:
    """The shapes of one rank's parameters; of degree 1: of the whole model."""
    geometry = Geometry.from_config(SHAPES[shape])
    return [spec.shape for spec in plan_shards(geometry, tp_rank, tp_size)]


def bytes_each(shape: str) -> int:
    """Bytes of a parameter in the dtype of the shape."""
    return {"bfloat16": 2, "float32": 4}[SHAPES[shape]["torch_dtype"]]


def model_bytes(shape: str) -> int:
    """Bytes of all parameters in the dtype of the shape, a tied head counted once."""
    geometry = Geometry.from_config(SHAPES[shape])
    return bytes_each(shape) * sum(
        math.prod(spec.full_shape) for spec in plan_shards(geometry, 0, 1)
    )


def active_parameters(shape: str) -> int:
    """Parameters that a token is multiplied with: of its experts, and all others but the
    embedding.
    """
    geometry = Geometry.from_config(SHAPES[shape])
    layers = sum(planned.multiplied for planned in parameters(geometry).values())
    return layers + geometry.vocab_size * geometry.hidden_size


def cache_gib(shape: str, tokens: int, tp: int = 1) -> int:
    """Return the least whole GiB of each of `tp` GPUs that hold the keys and values of so many
    tokens.
    """
    geometry = Geometry.from_config(SHAPES[shape])
    heads = max(1, geometry.num_kv_heads // tp)
    token = 2 * geometry.num_layers * heads * geometry.head_dim * bytes_each(shape)
    return math.ceil(tokens * token / (1 << 30))
