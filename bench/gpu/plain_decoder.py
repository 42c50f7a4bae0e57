"""The baseline of the trainer's speed: a packed Qwen3 in plain PyTorch, with nothing of this
project.

Variable-length attention is PyTorch's own. The output head takes chunks of tokens and computes each
again in the backward pass, so that logits are never kept. The layers may be compiled, each by
itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vllm_patching.weights.families import Geometry

CHUNK = 2048


Attention = Callable[[Tensor, Tensor, Tensor, Sequence[int], Tensor], Tensor]
"""Attention of packed q, k, v [tokens, heads, head_dim], with their sequences' lengths and
cu_seqlens [sequences + 1].
"""


def attention_of(device: torch.device) -> Attention:
    """Causal attention within each sequence; on a CPU, where torch has no such kernel, one sequence
    at a time.
    """
    if device.type != "cuda":
        return attention_by_sequence
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(
        varlen_attn
    ).parameters  # older versions take is_causal, later ones a window
    options: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    )
    shares_heads = "enable_gqa" in names
    if shares_heads:
        options["enable_gqa"] = True

    def attention(
        q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], cu_seqlens: Tensor
    ) -> Tensor:
        if not shares_heads:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        longest = max(lengths)
        mixed = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
        assert isinstance(mixed, Tensor), "options ask for no second result"
        return mixed

    return attention


def attention_by_sequence(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], cu_seqlens: Tensor
) -> Tensor:
    """One call of PyTorch's attention for each sequence."""
    parts = zip(*(x.transpose(0, 1).split(list(lengths), 1) for x in (q, k, v)), strict=True)
    spans = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[
            0
        ]
        for q, k, v in parts
    ]
    return torch.cat(spans, 1).transpose(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim] by [tokens, 1, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class PlainLayer(nn.Module):
    """One layer; its parameters have the names and shapes of the trainer's."""

    def __init__(self, g: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.g, self.attention = g, attention_of(device)

        def matrix(outputs: int, inputs: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))

        def norm(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device))

        self.qkv, self.o = (
            matrix(g.q_size + 2 * g.kv_size, g.hidden_size),
            matrix(g.hidden_size, g.q_size),
        )
        self.gate_up = matrix(2 * g.intermediate_size, g.hidden_size)
        self.down = matrix(g.hidden_size, g.intermediate_size)
        self.norm_in, self.norm_post = norm(g.hidden_size), norm(g.hidden_size)
        self.norm_q, self.norm_k = norm(g.head_dim), norm(g.head_dim)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int], cu_seqlens: Tensor
    ) -> Tensor:
        g, eps = self.g, self.g.rms_norm_eps
        mixed = F.linear(F.rms_norm(x, (g.hidden_size,), self.norm_in, eps), self.qkv)
        q, k, v = (
            part.view(len(x), -1, g.head_dim)
            for part in mixed.split([g.q_size, g.kv_size, g.kv_size], -1)
        )
        q = rotate(F.rms_norm(q, (g.head_dim,), self.norm_q, eps), cos, sin)
        k = rotate(F.rms_norm(k, (g.head_dim,), self.norm_k, eps), cos, sin)
        x = x + F.linear(
            self.attention(q, k, v, lengths, cu_seqlens).reshape(len(x), g.q_size), self.o
        )
        gate, up = F.linear(
            F.rms_norm(x, (g.hidden_size,), self.norm_post, eps), self.gate_up
        ).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


def head_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[tokens] float32 logprobs of the targets."""
    return -F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")


class PlainDecoder(nn.Module):
    """The model with tied embeddings, uninitialised."""

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device, compiled: bool = False
    ) -> None:
        super().__init__()
        self.g = g = geometry
        self.embedding = nn.Parameter(
            torch.empty(g.vocab_size, g.hidden_size, dtype=dtype, device=device)
        )
        self.layers = nn.ModuleList(PlainLayer(g, dtype, device) for _ in range(g.num_layers))
        self.norm_last = nn.Parameter(torch.empty(g.hidden_size, dtype=dtype, device=device))
        if compiled:
            for layer in self.layers:
                layer.compile()
        exponents = torch.arange(0, g.head_dim, 2, dtype=torch.float32, device=device) / g.head_dim
        self.frequencies = 1.0 / g.rope_theta**exponents

    def forward(
        self, tokens: Tensor, lengths: Sequence[int], sources: Tensor, targets: Tensor
    ) -> Tensor:
        """Logprobs [targets] float32 of targets, each predicted by the row of the same place in
        `sources`.

        Args:
            tokens: [tokens] of sequences of these lengths, one behind the other.
        """
        angles = (
            torch.cat([torch.arange(n, device=tokens.device) for n in lengths])[:, None].float()
            * self.frequencies
        )
        cos, sin = (
            table.to(self.embedding.dtype)[:, None] for table in (angles.cos(), angles.sin())
        )
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(tokens.device, torch.int32)
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x, cos, sin, lengths, cu_seqlens)
        hidden = F.rms_norm(x, (self.g.hidden_size,), self.norm_last, self.g.rms_norm_eps)[sources]
        chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.cat(
            [
                checkpoint(head_logprobs, rows, self.embedding, ids, use_reentrant=False)
                for rows, ids in chunks
            ]
        )
