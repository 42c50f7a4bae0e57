"""A decoder-only transformer whose parameters have vLLM's names, shapes and order of rows, on
packed tokens.

The query, key and value projections are one matrix (`qkv_proj`, rows [q; k; v]), and so are the
gate and up projections (`gate_up_proj`, rows [gate; up]): a weight can then go to the inference
server without being renamed or fused again. As in vLLM, what a layer adds to the residual leaves it
apart from that, and the next norm adds them.

What the layers compute is written here once; with which functions, the table of operations says
(`models/ops`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from example_trainer.errors import ModelError
from example_trainer.models.geometry import Geometry
from example_trainer.models.gradients import GradientSums, Total, summed
from example_trainer.models.head import chosen_logprobs_of, default_chunk
from example_trainer.models.ops import Operations, choose_operations
from example_trainer.models.packing import Packing
from example_trainer.models.shards import Shards
from example_trainer.models.split import Split


class Arithmetic:
    """How a model computes; all its modules share one.

    Attributes:
        ops: the operations.
        sums: where the backward pass adds the gradients; None: autograd leaves them at the
            parameters.
    """

    def __init__(self, ops: Operations) -> None:
        self.ops = ops
        self.sums: GradientSums | None = None

    def total(self, parameter: Tensor | None, as_head_of_tied: bool = False) -> Total | None:
        """Where a parameter's gradient is summed; None: autograd's own way."""
        return (
            None
            if self.sums is None or parameter is None
            else self.sums.total(parameter, as_head_of_tied)
        )


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, behind the addition of the residual."""

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps, self.arithmetic = eps, arithmetic

    def forward(
        self, x: Tensor, residual: Tensor | None, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual), [tokens, size] each.

        Before the first layer there is nothing to add.
        """
        ops, total = self.arithmetic.ops, self.arithmetic.total(self.weight)
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps, packing, total), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps, packing, total)


class Linear(nn.Module):
    """y = x Wᵀ + b, with parameters left uninitialised: they are always read from a checkpoint."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        self.arithmetic = arithmetic

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        total = self.arithmetic.total
        return self.arithmetic.ops.linear(
            x, self.weight, self.bias, packing, total(self.weight), total(self.bias)
        )


class RowLinear(Linear):
    """A linear layer whose inputs, and the columns of whose weight, are split over ranks.

    The bias is added to the sum.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
        split: Split,
    ) -> None:
        super().__init__(inputs // split.size, outputs, bias, dtype, device, arithmetic)
        self.split = split

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        total = self.arithmetic.total
        y = self.split.leave(
            self.arithmetic.ops.linear(x, self.weight, None, packing, total(self.weight))
        )
        return y if self.bias is None else y + summed(self.bias, total(self.bias))


def row_linear(
    inputs: int,
    outputs: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    arithmetic: Arithmetic,
    split: Split,
) -> Linear:
    """The layer that ends a split one: this rank's columns of it."""
    if split.size == 1:
        return Linear(inputs, outputs, bias, dtype, device, arithmetic)
    return RowLinear(inputs, outputs, bias, dtype, device, arithmetic, split)


class Embedding(nn.Module):
    """Rows of a table by token id; split over ranks, a rank looks up the ids that it has and the
    sum has them all.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
        split: Split,
    ) -> None:
        super().__init__()
        self.split, self.arithmetic = split, arithmetic
        self.first, self.end = split.vocabulary_range(geometry.vocab_size)
        rows = split.vocabulary_rows(geometry.vocab_size)
        self.weight = nn.Parameter(
            torch.empty(rows, geometry.hidden_size, dtype=dtype, device=device)
        )

    def forward(self, ids: Tensor) -> Tensor:
        ops, total = self.arithmetic.ops, self.arithmetic.total(self.weight)
        if self.split.size == 1:
            return ops.embedding(ids, self.weight, total)
        absent = (ids < self.first) | (ids >= self.end)
        rows = ops.embedding((ids - self.first).masked_fill(absent, 0), self.weight, total)
        return self.split.leave(rows.masked_fill(absent[:, None], 0))


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key/value head. Heads are split
    over ranks; where there are fewer key/value heads than ranks, several ranks hold the same one.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
        split: Split,
    ) -> None:
        super().__init__()
        self.geometry, self.split, self.arithmetic = geometry, split, arithmetic
        g = geometry
        self.q_size, self.kv_size = g.q_size // split.size, max(g.kv_size // split.size, g.head_dim)
        self.qkv_proj = Linear(
            g.hidden_size, self.q_size + 2 * self.kv_size, g.qkv_bias, dtype, device, arithmetic
        )
        self.o_proj = row_linear(
            g.q_size, g.hidden_size, g.o_bias, dtype, device, arithmetic, split
        )
        self.q_norm = (
            RMSNorm(g.head_dim, g.rms_norm_eps, dtype, device, arithmetic) if g.qk_norm else None
        )
        self.k_norm = (
            RMSNorm(g.head_dim, g.rms_norm_eps, dtype, device, arithmetic) if g.qk_norm else None
        )

    def forward(self, x: Tensor, packing: Packing, rotary: Tensor) -> Tensor:
        g, ops, total = self.geometry, self.arithmetic.ops, self.arithmetic.total
        norms: tuple[Tensor, Tensor] | None = None
        totals: tuple[Total | None, Total | None] = (None, None)
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
            totals = total(norms[0]), total(norms[1])
        qkv = self.qkv_proj(self.split.enter(x), packing)
        q, k, v = ops.heads(
            qkv,
            self.kv_size // g.head_dim,
            g.head_dim,
            norms,
            g.rms_norm_eps,
            packing,
            rotary,
            totals,
        )
        out = ops.attention(q, k, v, packing, float(g.head_dim**-0.5))
        y: Tensor = self.o_proj(out.reshape(len(x), self.q_size), packing)
        return y


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (arXiv:2002.05202). Its inner width is split over ranks."""

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
        split: Split,
    ) -> None:
        super().__init__()
        g = geometry
        self.split, self.arithmetic = split, arithmetic
        width = 2 * g.intermediate_size // split.size
        self.gate_up_proj = Linear(g.hidden_size, width, g.mlp_bias, dtype, device, arithmetic)
        self.down_proj = row_linear(
            g.intermediate_size, g.hidden_size, g.mlp_bias, dtype, device, arithmetic, split
        )

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        inner = self.arithmetic.ops.silu_and_mul(self.gate_up_proj(self.split.enter(x), packing))
        y: Tensor = self.down_proj(inner, packing)
        return y


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual path."""

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
        split: Split,
    ) -> None:
        super().__init__()
        g = geometry
        self.self_attn = Attention(g, dtype, device, arithmetic, split)
        self.mlp = MLP(g, dtype, device, arithmetic, split)
        self.input_layernorm = RMSNorm(g.hidden_size, g.rms_norm_eps, dtype, device, arithmetic)
        self.post_attention_layernorm = RMSNorm(
            g.hidden_size, g.rms_norm_eps, dtype, device, arithmetic
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, packing: Packing, rotary: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.input_layernorm(x, residual, packing)
        attended = self.self_attn(normed, packing, rotary)
        normed, residual = self.post_attention_layernorm(attended, residual, packing)
        return self.mlp(normed, packing), residual


class Stack(nn.Module):
    """Embedding, layers, last norm: everything under the name `model.`."""

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
        split: Split,
    ) -> None:
        super().__init__()
        g = geometry
        self.embed_tokens = Embedding(g, dtype, device, arithmetic, split)
        self.layers = nn.ModuleList(
            Layer(g, dtype, device, arithmetic, split) for _ in range(g.num_layers)
        )
        self.norm = RMSNorm(g.hidden_size, g.rms_norm_eps, dtype, device, arithmetic)


class Decoder(nn.Module):
    """The whole model. Its parameters are uninitialised until a checkpoint is read into them.

    Args:
        ops: the table that it computes with; not given: see choose_operations.

    Attributes:
        arithmetic: that table, and where gradients are summed.
        geometry: its sizes.
        source: the folder whose config and tokenizer files are copied beside saved weights; None if
            made from scratch.
        gradient_checkpointing: recompute each layer in the backward pass instead of keeping its
            activations.
        split: this rank's part of each layer; the parameters then have the shapes of vLLM's rank of
            the same number.
        shards: what this rank holds of each parameter.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        split: Split | None = None,
        ops: Operations | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.geometry = geometry
        self.split = split = split or Split()
        self.shards = Shards()
        self.source: Path | None = None
        self.gradient_checkpointing = False
        self.arithmetic = Arithmetic(ops or choose_operations(device, dtype))
        self.model = Stack(geometry, dtype, device, self.arithmetic, split)
        self.lm_head: Linear | None = None
        if not geometry.tie_word_embeddings:
            rows = split.vocabulary_rows(geometry.vocab_size)
            self.lm_head = Linear(geometry.hidden_size, rows, False, dtype, device, self.arithmetic)
        self.rotary: Tensor
        self.register_buffer(
            "rotary", self.arithmetic.ops.rotary_table(geometry, dtype, device), persistent=False
        )

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden]: the matrix that turns hidden states into logits; the embedding itself
        when they are tied. A split model has this rank's rows of it."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Hidden states after the last norm.

        Args:
            tokens: [tokens] int64, span after span.
            packing: where each span lies, and what it continues.

        Returns:
            [tokens, hidden] in the parameters' dtype. Each predicts the token that comes after it
            in its sequence.

        Raises:
            ModelError: a sequence is longer than the model has positions.
            ValueError: the table has no operation for such a packing.
        """
        if packing.longest > self.geometry.max_positions:
            raise ModelError(
                f"a sequence of {packing.longest} tokens exceeds the model's {self.geometry.max_positions} positions; "
                "lower --seq-len"
            )
        x, residual = self.model.embed_tokens(tokens), None
        for layer in self.model.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, residual = checkpoint(
                    layer, x, residual, packing, self.rotary, use_reentrant=False
                )
            else:
                x, residual = layer(x, residual, packing, self.rotary)
        hidden, _ = self.model.norm(x, residual, packing)
        return hidden

    def chosen_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        counts: Packing | None,
        chunk: int | None = None,
        temperature: float | Tensor = 1.0,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of given tokens and the entropy of what they were chosen from. Collective if the
        model is split.

        Args:
            hidden: [targets, hidden] states that predict the targets.
            targets: [targets] int64 ids.
            counts: how many of the targets belong to each sequence; None if there are no targets at
                all.
            chunk: targets whose logits exist at the same time, about; not given: see default_chunk.
            temperature, entropy_gradient: see `Operations.chosen_logprobs`.

        Returns:
            See `Operations.chosen_logprobs`.
        """
        weight, total = self.output_weight, self._head_total()
        chunk = chunk or default_chunk(hidden.device)
        if (
            self.split.size > 1 or counts is None
        ):  # a rank without targets still has a gradient, of zeros, to hand on
            vocab = self.geometry.vocab_size
            return chosen_logprobs_of(
                hidden,
                weight,
                targets,
                chunk,
                temperature,
                total,
                self.split,
                vocab,
                entropy_gradient,
            )
        return self.arithmetic.ops.chosen_logprobs(
            hidden, weight, targets, counts, chunk, temperature, total, entropy_gradient
        )

    def logits(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """Return the logits of every position. For small inputs; training never makes them.

        Args:
            tokens: [batch, length] int64.
            packing: of the rows laid one behind the other; not given: each row is a sequence.

        Returns:
            [batch, length, vocab] in the parameters' dtype.
        """
        packing = packing or Packing([tokens.shape[1]] * tokens.shape[0], tokens.device)
        hidden = self(tokens.flatten(), packing)
        logits = self.arithmetic.ops.linear(
            hidden, self.output_weight, None, packing, self._head_total()
        )
        return logits.view(*tokens.shape, -1)

    def _head_total(self) -> Total | None:
        return self.arithmetic.total(
            self.output_weight, as_head_of_tied=self.geometry.tie_word_embeddings
        )
