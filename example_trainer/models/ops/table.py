"""The operations that a decoder is made of. There is one decoder, and a table of these for each
kind of arithmetic.

    reference   plain torch, any device and floating dtype: CPUs, tests, and what the others are held against
    fast        kernels of our own and of libraries, for bf16 on GPUs
    invariant   vLLM's own kernels forward, sums in a fixed order backward: the bits of the sampler

Each table is a module with the functions of `Operations`. All have in common: tokens of all spans
are packed into the first dimension. `packing` has the places of the spans; heads come before the
head's dimension. With a `total` the gradient of a weight is added to that float32 sum and autograd
gets none. Without one it goes autograd's way, in the weight's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from example_trainer.models.packing import Packing
from example_trainer.models.shards import Split, Total
from vllm_patching.weights.families import Geometry


class Operations(Protocol):
    """The functions of a table. Logs and errors call it NAME."""

    NAME: str

    def rotary_table(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Cosines, then sines, of every position: [max_positions, rotary_dim], rounded to the
        dtype.
        """

    def embedding(self, ids: Tensor, weight: Tensor, total: Total | None = None) -> Tensor:
        """Rows of weight [vocab, width] for ids [tokens]: [tokens, width]."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        packing: Packing | None = None,
        total: Total | None = None,
        bias_total: Total | None = None,
    ) -> Tensor:
        """x Wᵀ + b for x [tokens, inputs], weight [outputs, inputs], bias [outputs]."""

    def row_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        split: Split,
        parts: int,
        packing: Packing | None = None,
        total: Total | None = None,
        bias_total: Total | None = None,
    ) -> Tensor:
        """The linear layer whose inputs are split over ranks, summed over them: [tokens, outputs].

        Collective if `split` has several ranks, which then have whole biases.

        Args:
            x, weight: this rank's columns.
            split: the ranks.
            parts: products that the layer is the sum of, see SumPlan; a multiple of the ranks.
                Tables without vLLM's bits sum the ranks' products in an order of their own.
        """

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        packing: Packing | None = None,
        total: Total | None = None,
    ) -> Tensor:
        """w · x / sqrt(mean(x²) + eps) over the last dimension of x [tokens, width]
        (arXiv:1910.07467), float32 inside.
        """

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        packing: Packing | None = None,
        total: Total | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(r), r) of r = x + residual, all [tokens, width]."""

    def heads(
        self,
        qkv: Tensor,
        kv_heads: int,
        head_dim: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        packing: Packing,
        rotary: Tensor,
        totals: tuple[Total | None, Total | None] = (None, None),
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] of qkv
        [tokens, all three].

        Queries and keys are normalised if there are `norms`. They are normalised head by head by
        weights [head_dim], or all heads at once by weights of all their dimensions. Then pairs (i,
        i + rotary_dim/2) are rotated by their positions (RoFormer, arXiv:2104.09864). Dimensions of
        a head behind rotary_dim stay as they are.

        Args:
            rotary: [positions, rotary_dim], cosines then sines, in the model's dtype.
            totals: of the two norms.
            interleaved: pairs are (2i, 2i + 1).
        """

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packing: Packing,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Causal attention of each span to what it sees: [tokens, heads, head_dim], of the shapes
        that `heads` gives.

        Query heads share key and value heads in equal groups.

        Args:
            window: a query sees the newest so many positions, its own included; None: all.

        Raises:
            ValueError: this table has no attention for a window, or for spans that continue
                others as these do.
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(gate) · up of x [tokens, 2 · width] (arXiv:2002.05202), the gate in its first half."""

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """gelu(gate) · up as `silu_and_mul`, with the tanh form of GELU (arXiv:1606.08415).

        Raises:
            ValueError: this table has none.
        """

    def route(
        self, logits: Tensor, count: int, renormalised: bool, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token by logits [tokens, experts]: the most likely ones.

        Args:
            count: experts of a token. If experts are equally likely, the lower numbers are chosen.
            renormalised: a token's weights are divided by their sum.
            chosen: [tokens, count] int64, experts to take instead of the most likely ones.

        Returns:
            Their weights, the softmax of the logits in float32 at the chosen experts, [tokens,
            count], differentiable; their numbers, [tokens, count] int64, the most likely first.
        """

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        down: Tensor,
        packing: Packing | None = None,
        totals: tuple[Total | None, Total | None] = (None, None),
        split: Split | None = None,
        parts: int = 1,
    ) -> Tensor:
        """The weighted sum of the gated MLPs that were chosen for each token: [tokens, width].

        A token's outputs are added in float32 in the order of its choices, and rounded once.

        Args:
            x: [tokens, width].
            weights, chosen: see `route`.
            gate_up: [experts, 2 · inner, width], the gate in the first half of an expert's rows.
            down: [experts, width, inner].
            totals: of gate_up and down.
            split, parts: of the inner width of every expert, see `row_linear`. Collective if
                `split` has several ranks.
        """

    def rows(self, x: Tensor, rows: Tensor, packing: Packing | None = None) -> Tensor:
        """x[rows] of x [tokens, width].

        Args:
            packing: of x. A row may be chosen several times only if it is `repeated`; not given:
                no row is.
        """

    def chosen_logprobs(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        counts: Packing | None,
        chunk: int,
        temperature: float | Tensor = 1.0,
        total: Total | None = None,
        entropy_gradient: bool = False,
        split: Split | None = None,
        vocab_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of given tokens and the entropy of what they were chosen from; logits are never
        kept. Collective if split.

        Args:
            hidden: [targets, width] states that predict the targets.
            weight: [vocab, width], the output matrix, or this rank's rows of it, padding included.
            targets: [targets] int64 ids.
            counts: how many of the targets belong to each sequence; None: all are of one.
            chunk: targets whose logits exist at the same time, about.
            temperature: divides the logits: one for all, or [targets] float32, which gets no
                gradient.
            entropy_gradient: the entropy is differentiable too: for a chance p_j of entropy H, dH /
                dlogit_j is -p_j (log p_j + H) / temperature.
            split, vocab_size: the ranks that split the rows, and the number of rows of them all.

        Returns:
            logprobs [targets] float32, differentiable; entropy [targets] float32 in nats,
            differentiable if asked for.

        Raises:
            ValueError: as many temperatures as there are not targets, or one that this table does
                not take.
        """
