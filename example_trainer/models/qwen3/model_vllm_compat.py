"""Qwen3 on vLLM's kernels, made from arguments as TorchTitan names them.

model = Qwen3VLLMCompatModel(Qwen3ModelArgs(dim=1024, n_layers=28, vocab_size=151936))
logits = model(input_ids)      # [batch, length, vocab]
logits.sum().backward()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.decoder import Decoder
from example_trainer.models.geometry import Geometry
from example_trainer.models.ops import invariant
from example_trainer.models.packing import Packing


@dataclass(frozen=True)
class Qwen3ModelArgs:
    """Sizes of a dense Qwen3 under TorchTitan's names; any object with these attributes will do in its place.

    Attributes:
        dim: width of the hidden states.
        n_layers, n_heads, n_kv_heads: how many.
        vocab_size: rows of the embedding.
        head_dim: width of a head, which need not be dim / n_heads.
        hidden_dim: inner width of the MLP.
        norm_eps: added under the norms' root.
        rope_theta: base of the rotary frequencies.
        qk_norm: whether queries and keys are normalised, head by head.
        max_seq_len: positions of the rotary table.
        enable_weight_tying: the embedding is the output matrix too.
    """

    dim: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    n_kv_heads: int = 8
    vocab_size: int = 151936
    head_dim: int = 128
    hidden_dim: int = 3072
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    qk_norm: bool = True
    max_seq_len: int = 4096
    enable_weight_tying: bool = False


class Qwen3VLLMCompatModel(Decoder):
    """A Qwen3 with random weights whose forward pass is vLLM's. Its parameters have vLLM's names, merged projections included.

    Args:
        model_args: Qwen3ModelArgs, TorchTitan's own, or anything with the same attributes; those that it lacks are as in
            Qwen3ModelArgs.
        dtype: of the parameters; not given: bfloat16 on a GPU, where vLLM's attention takes nothing wider, else float32.
        device: not given: the GPU, if there is one.

    Raises:
        ModelError: mixture of experts, or heads that do not divide.
    """

    def __init__(self, model_args: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
        super().__init__(geometry_of(model_args), dtype, place, ops=invariant)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw every matrix from N(0, 0.02²), from torch's global random numbers; norms become 1, biases 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=0.02)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """[batch, length, vocab] logits of [batch, length] ids, each row a sequence of its own. With a packing, hidden states
        of packed tokens, as Decoder.forward gives them."""
        return self.logits(tokens) if packing is None else super().forward(tokens, packing)


def geometry_of(model_args: Any) -> Geometry:
    """TorchTitan's arguments as this project's geometry. Raises ModelError for what is not supported."""
    defaults = Qwen3ModelArgs()
    given = {name: getattr(model_args, name, default) for name, default in vars(defaults).items()}
    if getattr(model_args, "moe_enabled", False):
        raise ModelError("mixture of experts is not supported; give the arguments of a dense Qwen3")
    if given["n_heads"] % given["n_kv_heads"]:
        raise ModelError(f"{given['n_heads']} attention heads cannot share {given['n_kv_heads']} key/value heads evenly")
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
