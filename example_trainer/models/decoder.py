"""A decoder-only transformer whose parameters have vLLM's names, shapes and order of rows, on
packed tokens.

The query, key and value projections are one matrix (`qkv_proj`, rows [q; k; v]). So are the gate
and up projections (`gate_up_proj`, rows [gate; up]). A weight can then go to the inference server
without being renamed or fused again. As in vLLM, what a layer adds to the residual leaves it apart
from that, and the next norm adds them.

The family's table (`vllm_patching/weights/families.py`) names the blocks of a layer and the shapes
of all parameters. The computation of each block is here, and calls the functions of a table of
operations (`models/ops`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from example_trainer.errors import ModelError
from example_trainer.models import head
from example_trainer.models.ops import Operations, choose_operations
from example_trainer.models.packing import Packing
from example_trainer.models.router import Routers
from example_trainer.models.shards import Shards, Split, Sums, Total, wide
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.weights.families import Geometry, parameters
from vllm_patching.weights.sharding import plan_shards

Routed = tuple[Tensor, Tensor]
"""The weights and the numbers of each token's experts; see `Operations.route`."""


class Routing(Protocol):
    """A function that chooses the experts of a layer, in place of the plain choice.

    Gradient checkpointing calls it again in the backward pass, with the same arguments.
    """

    def __call__(self, layer: int, logits: Tensor, packing: Packing, choose: Choose) -> Routed:
        """Return weights and experts.

        Args:
            layer: its number.
            logits: [tokens, experts] of its router, in the model's dtype.
            packing: of the tokens.
            choose: the plain choice.
        """


class Choose(Protocol):
    """`Operations.route` with the model's number of choices."""

    def __call__(self, logits: Tensor, *, chosen: Tensor | None = None) -> Routed:
        """Return weights and experts; see `Operations.route`."""


class Arithmetic:
    """The arithmetic of a model; all its modules share one.

    Attributes:
        ops: the operations.
        plan: the parts of row-parallel sums. It may be replaced between steps, and
            only the invariant operations follow it.
        sums: where the backward pass adds the gradients; None: autograd leaves them at the
            parameters.
        routers: of a mixture of experts; None for another model.
        routing: reads or changes how the experts of each layer are chosen; None: nothing does.
    """

    def __init__(self, ops: Operations, plan: SumPlan | None = None) -> None:
        self.ops = ops
        self.plan = plan or SumPlan()
        self.sums: Sums | None = None
        self.routers: Routers | None = None
        self.routing: Routing | None = None

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
        self, weight: nn.Parameter, eps: float, arithmetic: Arithmetic, less_one: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self.eps, self.arithmetic, self.less_one = eps, arithmetic, less_one

    def factor(self) -> Tensor:
        """The factor of what is normalised: the weight, or 1 + weight."""
        return 1 + wide(self.weight) if self.less_one else self.weight

    def forward(
        self, x: Tensor, residual: Tensor | None, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual), [tokens, size] each.

        Before the first layer there is nothing to add.
        """
        ops, total = self.arithmetic.ops, self.arithmetic.total(self.weight)
        factor = self.factor()
        if residual is None:
            return ops.rms_norm(x, factor, self.eps, packing, total), x
        return ops.add_rms_norm(x, residual, factor, self.eps, packing, total)


class Linear(nn.Module):
    """y = x Wᵀ + b."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, arithmetic: Arithmetic
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.arithmetic = weight, bias, arithmetic

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        total = self.arithmetic.total
        return self.arithmetic.ops.linear(
            x, self.weight, self.bias, packing, total(self.weight), total(self.bias)
        )


class RowLinear(Linear):
    """A linear layer whose inputs, and the columns of whose weight, are split over ranks. They are
    the trainer's, or a sampler's whose bits the trainer follows.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        arithmetic: Arithmetic,
        split: Split,
    ) -> None:
        super().__init__(weight, bias, arithmetic)
        self.split = split

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        total = self.arithmetic.total
        return self.arithmetic.ops.row_linear(
            x,
            self.weight,
            self.bias,
            self.split,
            self.arithmetic.plan.parts,
            packing,
            total(self.weight),
            total(self.bias),
        )


class Blueprint:
    """Makes the layers of a model. Their parameters have the shapes of the family's table, or of
    this rank's part of it, and no values yet.

    Attributes:
        geometry, split, arithmetic: see Decoder.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        split: Split,
        arithmetic: Arithmetic,
    ) -> None:
        self.geometry, self.split, self.arithmetic = geometry, split, arithmetic
        self._dtype, self._device = dtype, device
        self._shapes = {name: planned.shape for name, planned in parameters(geometry).items()}
        if split.size > 1:
            shards = plan_shards(geometry, split.rank, split.size)
            self._shapes = {spec.name: spec.shape for spec in shards}

    def has(self, name: str) -> bool:
        """Return whether the model has this parameter."""
        return name in self._shapes

    def parameter(self, name: str) -> nn.Parameter:
        """Make a parameter by its whole name."""
        return nn.Parameter(torch.empty(self._shapes[name], dtype=self._dtype, device=self._device))

    def linear(self, path: str) -> Linear:
        """Make a layer that is whole, or whose outputs are split."""
        return Linear(self.parameter(f"{path}.weight"), self._bias(path), self.arithmetic)

    def row_linear(self, path: str) -> Linear:
        """Make the layer that ends a split one. Adapters know the plain layer alone."""
        if self.split.size == 1 and self.arithmetic.ops.NAME != "invariant":
            return self.linear(path)
        return RowLinear(
            self.parameter(f"{path}.weight"), self._bias(path), self.arithmetic, self.split
        )

    def norm(self, path: str) -> RMSNorm:
        """Make a norm."""
        weight = self.parameter(f"{path}.weight")
        g = self.geometry
        return RMSNorm(weight, g.rms_norm_eps, self.arithmetic, g.family.norms_less_one)

    def _bias(self, path: str) -> nn.Parameter | None:
        return self.parameter(f"{path}.bias") if self.has(f"{path}.bias") else None


class Embedding(nn.Module):
    """Rows of a table by token id; split over ranks, a rank looks up the ids that it has and the
    sum has them all.
    """

    def __init__(self, path: str, blueprint: Blueprint) -> None:
        super().__init__()
        self.split, self.arithmetic = blueprint.split, blueprint.arithmetic
        self.first, self.end = self.split.vocabulary_range(blueprint.geometry.vocab_size)
        self.scale = 1.0
        if blueprint.geometry.family.scaled_embedding:
            self.scale = blueprint.geometry.hidden_size**0.5
        self.weight = blueprint.parameter(f"{path}.weight")

    def forward(self, ids: Tensor) -> Tensor:
        ops, total = self.arithmetic.ops, self.arithmetic.total(self.weight)
        if self.split.size == 1:
            rows = ops.embedding(ids, self.weight, total)
            if self.arithmetic.plan.parts > 1:
                rows = rows + 0.0  # as in a sum with vLLM's other ranks, -0.0 becomes 0.0
            return self._scaled(rows)
        absent = (ids < self.first) | (ids >= self.end)
        rows = ops.embedding((ids - self.first).masked_fill(absent, 0), self.weight, total)
        return self._scaled(self.split.leave(rows.masked_fill(absent[:, None], 0)))

    def _scaled(self, rows: Tensor) -> Tensor:
        if self.scale == 1:
            return rows
        # vLLM and transformers round the factor to the model's dtype.
        return rows * torch.tensor(self.scale, dtype=rows.dtype).item()


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key/value head. Heads are split
    over ranks; where there are fewer key/value heads than ranks, several ranks hold the same one.
    """

    def __init__(self, path: str, blueprint: Blueprint, window: int | None) -> None:
        super().__init__()
        self.geometry, self.split = blueprint.geometry, blueprint.split
        self.arithmetic, self.window = blueprint.arithmetic, window
        self.interleaved = self.geometry.family.interleaved
        self.scale = self.geometry.attention_scale
        self.qkv_proj = blueprint.linear(f"{path}.qkv_proj")
        self.o_proj = blueprint.row_linear(f"{path}.o_proj")
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if blueprint.has(f"{path}.q_norm.weight"):
            if blueprint.geometry.family.joint_qk_norm and self.split.size > 1:
                raise ModelError(
                    f"{blueprint.geometry.architecture} normalises queries over all heads, which a "
                    f"trainer split over {self.split.size} ranks does not have; train on one GPU "
                    "or without --single-copy"
                )
            self.q_norm = blueprint.norm(f"{path}.q_norm")
            self.k_norm = blueprint.norm(f"{path}.k_norm")
        self.q_size = self.o_proj.weight.shape[1]
        self.kv_size = (self.qkv_proj.weight.shape[0] - self.q_size) // 2

    def forward(self, x: Tensor, packing: Packing, rotary: Tensor) -> Tensor:
        g, ops, total = self.geometry, self.arithmetic.ops, self.arithmetic.total
        norms: tuple[Tensor, Tensor] | None = None
        totals: tuple[Total | None, Total | None] = (None, None)
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.factor(), self.k_norm.factor()
            totals = total(self.q_norm.weight), total(self.k_norm.weight)
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
            self.interleaved,
        )
        out = ops.attention(q, k, v, packing, self.scale, self.window)
        y: Tensor = self.o_proj(out.reshape(len(x), self.q_size), packing)
        return y


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)) (arXiv:2002.05202). Its inner width is split over ranks."""

    def __init__(self, path: str, blueprint: Blueprint, window: int | None) -> None:
        super().__init__()
        self.split, self.arithmetic = blueprint.split, blueprint.arithmetic
        self.activation = blueprint.geometry.family.activation
        self.gate_up_proj = blueprint.linear(f"{path}.gate_up_proj")
        self.down_proj = blueprint.row_linear(f"{path}.down_proj")

    def forward(self, x: Tensor, packing: Packing, rotary: Tensor) -> Tensor:
        ops = self.arithmetic.ops
        gated = ops.silu_and_mul if self.activation == "silu" else ops.gelu_and_mul
        y: Tensor = self.down_proj(gated(self.gate_up_proj(self.split.enter(x), packing)), packing)
        return y


class Experts(nn.Module):
    """The matrices of a layer's experts, stacked."""

    def __init__(self, path: str, blueprint: Blueprint) -> None:
        super().__init__()
        self.arithmetic, self.split = blueprint.arithmetic, blueprint.split
        self.w13_weight = blueprint.parameter(f"{path}.w13_weight")
        self.w2_weight = blueprint.parameter(f"{path}.w2_weight")

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, packing: Packing) -> Tensor:
        """Return the weighted sum of the chosen experts; see `Operations.experts`."""
        ops, total = self.arithmetic.ops, self.arithmetic.total
        totals = total(self.w13_weight), total(self.w2_weight)
        return ops.experts(
            x,
            weights,
            chosen,
            self.w13_weight,
            self.w2_weight,
            packing,
            totals,
            self.split,
            self.arithmetic.plan.parts,
        )


class Mixture(nn.Module):
    """A router and its experts; a few of them compute each token (arXiv:1701.06538).

    The inner width of each expert is split over ranks; each rank has the whole router.
    """

    def __init__(self, path: str, blueprint: Blueprint, window: int | None) -> None:
        super().__init__()
        self.geometry, self.split = blueprint.geometry, blueprint.split
        self.arithmetic = blueprint.arithmetic
        self.layer = int(path.split(".")[2])
        self.gate = blueprint.linear(f"{path}.gate")
        self.experts: nn.Module = Experts(f"{path}.experts", blueprint)

    def forward(self, x: Tensor, packing: Packing, rotary: Tensor) -> Tensor:
        x = self.split.enter(x)
        logits, routers = self.gate(x, packing), self.arithmetic.routers
        choose = partial(self._choose, packing)
        if routers is None:
            weights, chosen = choose(logits)
        else:
            weights, chosen = routers.choose(self.layer, logits, choose, packing.shared_by)
        y: Tensor = self.experts(x, weights, chosen, packing)
        return y

    def _choose(self, packing: Packing, logits: Tensor) -> Routed:
        g, routing = self.geometry, self.arithmetic.routing
        choose: Choose = partial(
            self.arithmetic.ops.route, count=g.experts_per_token, renormalised=g.norm_topk_prob
        )
        if routing is None:
            return choose(logits)
        return routing(self.layer, logits, packing, choose)


_BLOCKS: dict[str, type[Attention | GatedMLP | Mixture]] = {
    "attention": Attention,
    "gated_mlp": GatedMLP,
    "moe": Mixture,
}


class Layer(nn.Module):
    """The family's blocks one after the other, each beside a residual path."""

    def __init__(self, number: int, blueprint: Blueprint) -> None:
        super().__init__()
        path, self.window = f"model.layers.{number}", blueprint.geometry.window(number)
        family = blueprint.geometry.family
        self.blocks = blueprint.geometry.blocks(number)
        for block in self.blocks:
            module = _BLOCKS[block.kind](f"{path}.{block.name}", blueprint, self.window)
            self.add_module(block.name, module)
        for norm in family.norms:
            self.add_module(norm, blueprint.norm(f"{path}.{norm}"))

    def forward(
        self, x: Tensor, residual: Tensor | None, packing: Packing, rotary: Tensor
    ) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            if block.norm is not None:
                normed, residual = self.get_submodule(block.norm)(x, residual, packing)
            else:
                normed = residual = x if residual is None else x + residual
            x = self.get_submodule(block.name)(normed, packing, rotary)
            if block.norm_after is not None:
                x, _ = self.get_submodule(block.norm_after)(x, None, packing)
        assert residual is not None
        return x, residual


class Stack(nn.Module):
    """Embedding, layers, last norm: everything under the name `model.`."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.embed_tokens = Embedding("model.embed_tokens", blueprint)
        self.layers = nn.ModuleList(
            Layer(number, blueprint) for number in range(blueprint.geometry.num_layers)
        )
        self.norm = blueprint.norm("model.norm")


class Decoder(nn.Module):
    """The whole model. Its parameters are uninitialised until a checkpoint is read into them.

    Args:
        ops: the table that it computes with; not given: see choose_operations.
        plan: see Arithmetic.

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

    reaches_some = False
    """True if a backward pass may leave parameters without a gradient."""

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        split: Split | None = None,
        ops: Operations | None = None,
        plan: SumPlan | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.geometry = geometry
        self.split = split = split or Split()
        self.shards = Shards()
        self.source: Path | None = None
        self.gradient_checkpointing = False
        self.arithmetic = Arithmetic(ops or choose_operations(device, dtype), plan)
        if layers := geometry.sparse_layers:
            # All ranks that split a layer see the same tokens: one adds the losses of routers.
            self.arithmetic.routers = Routers(layers, geometry.num_experts, split.rank == 0)
        blueprint = Blueprint(geometry, dtype, device, split, self.arithmetic)
        self.model = Stack(blueprint)
        self.lm_head: Linear | None = None
        if not geometry.tie_word_embeddings:
            self.lm_head = blueprint.linear("lm_head")
        self.rotary: Tensor
        self.local_rotary: Tensor | None
        self.register_buffer("rotary", None, persistent=False)
        self.register_buffer("local_rotary", None, persistent=False)
        self.make_rotary(dtype, device)

    def make_rotary(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compute the tables of cosines and sines."""
        table, local = self.arithmetic.ops.rotary_table, self.geometry.local_rope
        self.rotary = table(self.geometry, dtype, device)
        if local is not None:
            self.local_rotary = table(local, dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in. The parameters' too, unless they are float32
        masters (see Shards)."""
        return self.rotary.dtype

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden]: the matrix that turns hidden states into logits; the embedding itself
        when they are tied. A split model has this rank's rows of it."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def held_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that checkpoints hold, by name."""
        return dict(self.named_parameters())

    def prepare(self) -> None:
        """Choose what depends on the weights, once they are there. Collective if spread."""

    def require_positions(self, packing: Packing) -> None:
        """Raise ModelError if a sequence is longer than the model has positions."""
        if packing.longest > self.geometry.max_positions:
            raise ModelError(
                f"a sequence of {packing.longest} tokens exceeds the model's {self.geometry.max_positions} positions; "
                "lower --seq-len"
            )

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Hidden states after the last norm.

        Args:
            tokens: [tokens] int64, span after span.
            packing: where each span lies, and what it continues.

        Returns:
            [tokens, hidden] in the model's dtype. Each predicts the token that comes after it
            in its sequence.

        Raises:
            ModelError: a sequence is longer than the model has positions.
            ValueError: the table has no operation for such a packing.
        """
        self.require_positions(packing)
        x, residual = self.model.embed_tokens(tokens), None
        for layer in self.model.layers:
            rotary = self.rotary
            if layer.window is not None and self.local_rotary is not None:
                rotary = self.local_rotary
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, residual = checkpoint(layer, x, residual, packing, rotary, use_reentrant=False)
            else:
                x, residual = layer(x, residual, packing, rotary)
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
        # A rank without targets still has a gradient, of zeros, to hand on.
        compute = head.chosen_logprobs if counts is None else self.arithmetic.ops.chosen_logprobs
        return compute(
            hidden, self.output_weight, targets, counts, chunk or head.default_chunk(hidden.device),
            temperature, self._head_total(), entropy_gradient, self.split, self.geometry.vocab_size,
        )  # fmt: skip

    def logits(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """Return the logits of every position. For small inputs; training never makes them.

        Args:
            tokens: [batch, length] int64.
            packing: of the rows laid one behind the other; not given: each row is a sequence.

        Returns:
            [batch, length, vocab] in the model's dtype.
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
