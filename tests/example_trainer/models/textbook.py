"""The decoder as the papers have it: one sequence, float64, from the definitions alone.

Packed computation must equal it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from example_trainer.models.decoder import Decoder
from example_trainer.models.lora.layers import adapters_of
from vllm_patching.weights.families import Geometry


def logits(parameters: Mapping[str, Tensor], geometry: Geometry, tokens: Tensor) -> Tensor:
    """[length, vocab] logits of one sequence [length], with plain rotary frequencies."""
    p, g = parameters, geometry
    length = len(tokens)
    frequencies = g.rope_theta ** -(
        torch.arange(0, g.head_dim, 2, dtype=torch.float64) / g.head_dim
    )
    turn = torch.polar(
        torch.ones(length, g.head_dim // 2, dtype=torch.float64),
        torch.outer(torch.arange(length), frequencies),
    )
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return p[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + g.rms_norm_eps).sqrt()

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def rotated(x: Tensor) -> Tensor:
        half = torch.complex(*x.chunk(2, dim=-1)) * turn[:, None]
        return torch.cat((half.real, half.imag), dim=-1)

    x = p["model.embed_tokens.weight"][tokens]
    for number in range(g.num_layers):
        layer = f"model.layers.{number}"
        qkv = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn.qkv_proj")
        q, k, v = (
            part.unflatten(-1, (-1, g.head_dim))
            for part in qkv.split([g.q_size, g.kv_size, g.kv_size], dim=-1)
        )
        if g.qk_norm:
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        q, k = rotated(q), rotated(k)
        outs = []
        for head in range(g.num_heads):
            shared = head // (g.num_heads // g.num_kv_heads)
            scores = (q[:, head] @ k[:, shared].T / g.head_dim**0.5).masked_fill(future, -torch.inf)
            outs.append(scores.softmax(-1) @ v[:, shared])
        x = x + linear(torch.cat(outs, -1), f"{layer}.self_attn.o_proj")
        gate, up = linear(
            norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.gate_up_proj"
        ).chunk(2, -1)
        x = x + linear(gate * gate.sigmoid() * up, f"{layer}.mlp.down_proj")
    head_name = "model.embed_tokens.weight" if g.tie_word_embeddings else "lm_head.weight"
    return norm(x, "model.norm") @ p[head_name].T


@torch.no_grad()
def merged_weights(model: Decoder) -> dict[str, Tensor]:
    """The base model's parameters with the adapters added to them: W + scale · B A, summed in
    float32, in W's dtype.
    """
    result = {
        name: p.detach().clone() for name, p in model.named_parameters() if ".adapters." not in name
    }
    for found in adapters_of(model):
        rows = result[f"{found.layer}.weight"].narrow(0, found.start, found.adapter.lora_B.shape[0])
        product = found.adapter.lora_B.float() @ found.adapter.lora_A.float()
        rows.copy_(rows.float() + found.adapter.scale * product)
    return result
