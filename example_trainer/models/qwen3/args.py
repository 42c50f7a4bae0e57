"""The sizes of a Qwen3 under TorchTitan's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from example_trainer.errors import ModelError
from vllm_patching.weights.families import Geometry


@dataclass(frozen=True)
class Qwen3ModelArgs:
    """Sizes of a dense Qwen3 under TorchTitan's names; any object with these attributes will do in
    its place.

    Attributes:
        dim: width of the hidden states.
        n_layers, n_heads, n_kv_heads: how many; without n_kv_heads as many as n_heads.
        vocab_size: rows of the embedding.
        head_dim: width of a head, which need not be dim / n_heads.
        hidden_dim: inner width of the MLP.
        norm_eps: added under the norms' root.
        rope_theta: base of the rotary frequencies.
        qk_norm: whether queries and keys are normalised, head by head.
        max_seq_len: positions of the rotary table.
        enable_weight_tying: the embedding is the output matrix too.
        depth_init: `init_weights` makes what deeper layers add to the residual smaller.
        eos_id: token that ends a text; the model does not use it.
    """

    dim: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    n_kv_heads: int | None = 8
    vocab_size: int = 151936
    head_dim: int = 128
    hidden_dim: int = 3072
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    qk_norm: bool = True
    max_seq_len: int = 4096
    enable_weight_tying: bool = False
    depth_init: bool = True
    eos_id: int = 151645


def geometry_of(model_args: Any) -> Geometry:
    """TorchTitan's arguments as this project's geometry.

    Raises ModelError for what is not supported.
    """
    defaults = Qwen3ModelArgs()
    given = {name: getattr(model_args, name, default) for name, default in vars(defaults).items()}
    given["n_kv_heads"] = given["n_kv_heads"] or given["n_heads"]
    if getattr(model_args, "moe_enabled", False):
        raise ModelError("mixture of experts is not supported; give the arguments of a dense Qwen3")
    if given["n_heads"] % given["n_kv_heads"]:
        raise ModelError(
            f"{given['n_heads']} attention heads cannot share {given['n_kv_heads']} key/value heads evenly"
        )
    return Geometry(
        architecture="Qwen3ForCausalLM",
        vocab_size=given["vocab_size"],
        hidden_size=given["dim"],
        intermediate_size=given["hidden_dim"],
        num_layers=given["n_layers"],
        num_heads=given["n_heads"],
        num_kv_heads=given["n_kv_heads"],
        head_dim=given["head_dim"],
        max_positions=given["max_seq_len"],
        rms_norm_eps=given["norm_eps"],
        rope_theta=float(given["rope_theta"]),
        qk_norm=given["qk_norm"],
        tie_word_embeddings=given["enable_weight_tying"],
    )
