"""Models of transformers with our attention, norms and gates on a GPU, for each width of heads.

    python tests/gpu/check_transformers_models.py [--json FILE]

Each model has two layers of random weights in bf16. Transformers' own modules compute the expected
hidden states and gradients in float32, one sequence at a time. Their error in bf16, times a factor,
is the limit. Without a GPU plain torch computes both.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from bench.gpu.checks import Check, run_checks
from example_trainer.models.packing import Packing
from example_trainer.models.transformers_layout import TransformersGeometry, transformers_geometry
from example_trainer.models.transformers_model import TransformersModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (700, 1, 64, 1300)
FACTOR = 1.5
"""Our error may be this many times that of transformers."""
SIZES = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"shared keys, heads of {width}": ("Qwen3ForCausalLM", {"head_dim": width})
        for width in (64, 80, 96, 100, 128)
    },
    "one key head, heads of 256": (
        "GemmaForCausalLM",
        {"head_dim": 256, "num_key_value_heads": 1},
    ),
    "windows of 200, heads of 128": (
        "MistralForCausalLM",
        {"head_dim": 128, "sliding_window": 200},
    ),
    "latent attention, heads of 192 and 128": ("DeepseekV3ForCausalLM", LATENT),
}


def geometry_of(architecture: str, changes: dict[str, Any], folder: str) -> TransformersGeometry:
    """Write a config.json and read it."""
    import transformers

    kind = getattr(transformers, architecture)
    config = kind.config_class(**SIZES | changes, architectures=[architecture])
    config.save_pretrained(folder)
    return transformers_geometry(Path(folder))


def made(geometry: TransformersGeometry, dtype: torch.dtype, ours: bool) -> TransformersModel:
    """The model with random weights, which are the same in each dtype.

    Args:
        ours: it has our attention, norms and gates, and else transformers' own.
    """
    model = TransformersModel(geometry, dtype, DEVICE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.held_tensors().values():
            drawn = 0.05 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn.bfloat16() + (tensor.dim() == 1))
    if ours:
        model.choose_way()
        return model
    for module in model.modules():
        if module not in set(model.parts.layers):
            vars(module).pop("forward", None)
    model.parts.base.set_attn_implementation("eager")
    model.way = "one per row"
    return model


def results(model: TransformersModel) -> list[Tensor]:
    """Hidden states, and the gradients of the first layer's parameters and the embedding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (sum(LENGTHS),), generator=generator).to(DEVICE)
    hidden = model(tokens, Packing(LENGTHS, DEVICE))
    mixed = torch.randn(hidden.shape, generator=generator).to(DEVICE)
    (hidden.float() * mixed).sum().backward()
    gradients = [
        parameter.grad.float()
        for parameter in (*model.parts.layers[0].parameters(), *model.parts.embedding.parameters())
        if parameter.grad is not None
    ]
    return [hidden.detach().float(), *gradients]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def check(architecture: str, changes: dict[str, Any]) -> tuple[bool, str]:
    """Compare our modules and transformers' with float32."""
    with tempfile.TemporaryDirectory() as folder:
        geometry = geometry_of(architecture, changes, folder)
        expected = results(made(geometry, torch.float32, ours=False))
        model = made(geometry, torch.bfloat16, ours=True)
        mine = error(results(model), expected)
        theirs = error(results(made(geometry, torch.bfloat16, ours=False)), expected)
    gc.collect()
    seen = f"{model.attention}, {model.way}; error {mine:.1e}, of transformers' {theirs:.1e}"
    chosen = model.attention.startswith("ours") and model.way == "packed"
    return chosen and mine <= FACTOR * theirs, seen


def main(arguments: list[str] | None = None) -> int:
    """Make every check; 0 if all passed."""
    checks: dict[str, Check] = {
        name: partial(check, architecture, changes)
        for name, (architecture, changes) in CASES.items()
    }
    return run_checks(__doc__, checks, arguments, needs_gpu=False)


if __name__ == "__main__":
    sys.exit(main())
