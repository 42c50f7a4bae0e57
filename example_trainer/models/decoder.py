"""A decoder-only transformer whose parameters have vLLM's names, shapes and order of rows.

The query, key and value projections are one matrix (`qkv_proj`, rows [q; k; v]), and so are the gate and up projections
(`gate_up_proj`, rows [gate; up]): a weight can then go to the inference server without being renamed or fused again.
The arithmetic follows vLLM: everything in the parameters' dtype, RMSNorm in float32 up to and including the
multiplication by its weight, rotary tables rounded to the parameters' dtype.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from example_trainer.errors import ModelError
from example_trainer.models.geometry import Geometry, RopeScaling
from example_trainer.models.shards import Shards
from example_trainer.models.split import Split


class RMSNorm(nn.Module):
    """Root mean square normalisation: w · x / sqrt(mean(x²) + eps), in float32, rounded once at the end (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (scaled * self.weight.float()).to(x.dtype)


class Linear(nn.Module):
    """y = x Wᵀ + b, with parameters left uninitialised: they are always read from a checkpoint."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear(Linear):
    """A linear layer whose inputs, and the columns of whose weight, are split over ranks. The bias is added to the sum."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device, split: Split) -> None:
        super().__init__(inputs, outputs, bias, dtype, device)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        y = self.split.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def row_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device, split: Split) -> Linear:
    """The layer that ends a split one: this rank's columns of it."""
    if split.size == 1:
        return Linear(inputs, outputs, bias, dtype, device)
    return RowLinear(inputs // split.size, outputs, bias, dtype, device, split)


class Embedding(nn.Module):
    """Rows of a table by token id; split over ranks, a rank looks up the ids that it has and the sum has them all."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, split: Split) -> None:
        super().__init__()
        self.split = split
        self.first, self.end = split.vocabulary_range(geometry.vocab_size)
        rows = split.vocabulary_rows(geometry.vocab_size)
        self.weight = nn.Parameter(torch.empty(rows, geometry.hidden_size, dtype=dtype, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        if self.split.size == 1:
            return F.embedding(ids, self.weight)
        absent = (ids < self.first) | (ids >= self.end)
        rows = F.embedding((ids - self.first).masked_fill(absent, 0), self.weight)
        return self.split.leave(rows.masked_fill(absent[..., None], 0))


def rotary_table(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines of every position.

    Returns:
        [max_positions, head_dim]: the first half of each row holds cosines, the second half sines, computed in float32
        and then rounded to `dtype`, as vLLM's table is.
    """
    exponents = torch.arange(0, geometry.head_dim, 2, dtype=torch.float32) / geometry.head_dim
    frequencies = _stretch(1.0 / (geometry.rope_theta**exponents), geometry.rope_scaling)
    angles = torch.outer(torch.arange(geometry.max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype=dtype, device=device)


def _stretch(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Scale rotary frequencies (radians per position). Llama 3 leaves short wavelengths as they are (arXiv:2407.21783)."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # how often it turns over the original context
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / spread).clamp(0, 1) if spread else (turns > scaling.low_freq_factor).float()
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim/2). x: [batch, heads, length, head_dim]; cos, sin: [length, head_dim/2] (RoFormer)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _repeats_heads(q: Tensor) -> bool:
    """Whether shared key/value heads must be repeated for attention: in float32 no GPU kernel of torch knows shared heads, and
    what it falls back on keeps length × length matrices."""
    return q.is_cuda and q.dtype is torch.float32


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key/value head. Heads are split over ranks; where there
    are fewer key/value heads than ranks, several ranks hold the same one.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, split: Split) -> None:
        super().__init__()
        self.geometry, self.split = geometry, split
        g = geometry
        self.q_size, self.kv_size = g.q_size // split.size, max(g.kv_size // split.size, g.head_dim)
        self.qkv_proj = Linear(g.hidden_size, self.q_size + 2 * self.kv_size, g.qkv_bias, dtype, device)
        self.o_proj = row_linear(g.q_size, g.hidden_size, g.o_bias, dtype, device, split)
        self.q_norm = RMSNorm(g.head_dim, g.rms_norm_eps, dtype, device) if g.qk_norm else None
        self.k_norm = RMSNorm(g.head_dim, g.rms_norm_eps, dtype, device) if g.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        g = self.geometry
        batch, length, _ = x.shape
        q, k, v = self.qkv_proj(self.split.enter(x)).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k, v = (part.view(batch, length, -1, g.head_dim) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        shared = self.q_size != self.kv_size
        if shared and _repeats_heads(q):
            k, v = (part.repeat_interleave(self.q_size // self.kv_size, dim=1) for part in (k, v))
            shared = False
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=g.head_dim**-0.5, enable_gqa=shared)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, self.q_size))


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (arXiv:2002.05202). Its inner width is split over ranks."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, split: Split) -> None:
        super().__init__()
        g = geometry
        self.split = split
        self.gate_up_proj = Linear(g.hidden_size, 2 * g.intermediate_size // split.size, g.mlp_bias, dtype, device)
        self.down_proj = row_linear(g.intermediate_size, g.hidden_size, g.mlp_bias, dtype, device, split)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(self.split.enter(x)).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual path."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, split: Split) -> None:
        super().__init__()
        self.self_attn = Attention(geometry, dtype, device, split)
        self.mlp = MLP(geometry, dtype, device, split)
        self.input_layernorm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """Embedding, layers, last norm: everything under the name `model.`."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, split: Split) -> None:
        super().__init__()
        self.embed_tokens = Embedding(geometry, dtype, device, split)
        self.layers = nn.ModuleList(Layer(geometry, dtype, device, split) for _ in range(geometry.num_layers))
        self.norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps, dtype, device)


class Decoder(nn.Module):
    """The whole model. Its parameters are uninitialised until a checkpoint is read into them.

    Attributes:
        geometry: its sizes.
        source: the folder whose config and tokenizer files are copied beside saved weights; None if made from scratch.
        gradient_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
        split: this rank's part of each layer; the parameters then have the shapes of vLLM's rank of the same number.
        shards: what this rank holds of each parameter.
    """

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str = "cpu", split: Split | None = None
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.geometry = geometry
        self.split = split = split or Split()
        self.shards = Shards()
        self.source: Path | None = None
        self.gradient_checkpointing = False
        self.model = Stack(geometry, dtype, device, split)
        rows = split.vocabulary_rows(geometry.vocab_size)
        tied = geometry.tie_word_embeddings
        self.lm_head = None if tied else Linear(geometry.hidden_size, rows, bias=False, dtype=dtype, device=device)
        self.rotary: Tensor
        self.register_buffer("rotary", rotary_table(geometry, dtype, device), persistent=False)

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden]: the matrix that turns hidden states into logits; the embedding itself when they are tied. A split
        model has this rank's rows of it."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states after the last norm.

        Args:
            tokens: [batch, length] int64, each row starting at position 0 and padded on the right with any valid id.
                What lies after a position never reaches it, so padding needs no mask; its own outputs mean nothing.

        Returns:
            [batch, length, hidden] in the parameters' dtype. Position t predicts token t + 1.

        Raises:
            ModelError: the rows are longer than the model has positions.
        """
        length = tokens.shape[1]
        if length > self.geometry.max_positions:
            raise ModelError(
                f"a sequence of {length} tokens exceeds the model's {self.geometry.max_positions} positions; lower --seq-len"
            )
        cos, sin = self.rotary[:length].chunk(2, dim=-1)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length, vocab] logits in the parameters' dtype. For tests and small inputs; training never makes them."""
        return F.linear(self(tokens), self.output_weight)
