"""The routers of a mixture of experts: their auxiliary losses, and their figures of a step.

In a layer of E experts, a token's router gives logits l and probabilities p = softmax(l). The
token goes to its k most probable experts.

    balance   E · Σ_i f_i P_i                  Switch Transformer, arXiv:2101.03961, equation 4
    z         mean over tokens of lse(l)²      ST-MoE, arXiv:2202.08906, equation 5

f_i is the share of all choices that fell on expert i, and P_i the mean of p_i. Both count every
token of every forwarded sequence of an update, over all bins and ranks. A token that several
sequences of a bin share is forwarded once, and counts once for each of them. So neither loss depends
on how a batch is packed. Each layer has its own losses, and the layers' losses add up. The balance loss is 1 if every
expert gets as many tokens as any other. f has no gradient.

f counts the tokens of all bins, but the backward pass of a bin needs f before the next bin is
forwarded. So an update with a balance loss is forwarded once more, before its first bin, to count
the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.models.shards import wide

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns the weights and the numbers of each token's experts, [tokens, k] each, from logits."""

IDLE_STEPS = 20
"""Steps without a token after which the log names an expert."""
_NAMED = 8


@dataclass(frozen=True)
class RouterLosses:
    """Factors of the auxiliary losses; 0: the loss is not taken."""

    balance: float = 0.0
    z: float = 0.0


def balance_loss(probabilities: Tensor, shares: Tensor) -> Tensor:
    """E · Σ_i f_i P_i of one layer.

    Args:
        probabilities: [experts], P: the router's mean probability of each expert.
        shares: [experts], f: the share of the choices that fell on each expert.
    """
    return len(shares) * (shares * probabilities).sum()


def loss_gradient(
    logits: Tensor,
    shares: Tensor | None,
    tokens: Tensor,
    losses: RouterLosses,
    shared_by: Tensor | None = None,
) -> Tensor:
    """The gradient of both losses with respect to some of the logits.

        balance   E / T · p_i (f_i - Σ_j f_j p_j)        z   2 / T · lse(l) p_i

    Args:
        logits: [n, experts] of one layer, n of the update's tokens.
        shares: [experts], see balance_loss; None without a balance loss.
        tokens: T, the tokens of the update.
        shared_by: [n], how often each token counts in T; None: once.

    Returns:
        [n, experts] in float32, or float64 for float64.
    """
    value = wide(logits)
    probabilities = value.softmax(-1)
    slope = torch.zeros_like(value)
    if losses.balance and shares is not None:
        mean = (probabilities * shares).sum(-1, keepdim=True)
        slope += losses.balance * value.shape[-1] * (shares - mean)
    if losses.z:
        slope += 2 * losses.z * value.logsumexp(-1, keepdim=True)
    if shared_by is not None:
        slope *= shared_by[:, None]
    return slope * probabilities / tokens


class _WithLosses(torch.autograd.Function):
    """The logits, unchanged. The gradient of the auxiliary losses is added to their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        shares: Tensor | None,
        tokens: Tensor,
        losses: RouterLosses,
        shared_by: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.parts = shares, tokens, losses, shared_by
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        own = loss_gradient(logits, *ctx.parts)
        return (wide(gradient) + own).to(gradient.dtype), None, None, None, None


class RouterSums:
    """Sums over tokens, layer by layer, in float64: what all figures are made of.

    Attributes:
        choices: [layers, experts], tokens that each expert got.
        probabilities: [layers, experts], the routers' probabilities.
        entropies, squares: [layers], the entropy of p and lse(l)².
        tokens: [layers].
    """

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._flat = torch.zeros(layers, 2 * experts + 3, dtype=torch.float64, device=device)
        self.choices, self.probabilities, rest = self._flat.split((experts, experts, 3), dim=1)
        self.entropies, self.squares, self.tokens = rest.unbind(1)

    @torch.no_grad()
    def add(
        self, row: int, logits: Tensor, experts: Tensor, shared_by: Tensor | None = None
    ) -> None:
        """Count the tokens of one bin in one layer. The host does not wait for the device.

        Args:
            row: of the layer.
            logits, experts: [tokens, experts] and [tokens, choices] of them.
            shared_by: [tokens], how often each counts; None: once.
        """
        times = experts.new_ones(len(logits)) if shared_by is None else shared_by
        logs = logits.double().log_softmax(-1)
        probabilities = logs.exp() * times[:, None]
        # Counted in integers, whose sum does not depend on the order in which a GPU adds.
        counts = torch.zeros(logits.shape[-1], dtype=torch.int64, device=logits.device)
        each = times.long()[:, None].expand_as(experts).flatten()
        self.choices[row] += counts.scatter_add_(0, experts.flatten().long(), each)
        self.probabilities[row] += probabilities.sum(0)
        self.entropies[row] -= (probabilities * logs).sum()
        self.squares[row] += (logits.double().logsumexp(-1).square() * times).sum()
        self.tokens[row] += times.sum()

    def join(self, other: RouterSums) -> None:
        """Add other sums to these."""
        self._flat += other._flat

    def over_ranks(self, total: Callable[[Tensor], Tensor]) -> RouterSums:
        """Return the sums over all ranks. Collective.

        Args:
            total: adds a float64 vector up over the ranks; may change it.
        """
        layers, experts = self.choices.shape
        joined = RouterSums(layers, experts, self._flat.device)
        joined._flat.copy_(total(self._flat.flatten()).view_as(self._flat))
        return joined

    def shares(self) -> Tensor:
        """[layers, experts] float32: f of each layer, see balance_loss."""
        whole = self.choices.sum(1, keepdim=True).clamp(min=1)
        return (self.choices / whole).float()


def router_figures(sums: RouterSums) -> dict[str, float | None]:
    """Return the figures of a step, from the sums over all its passes and ranks.

    expert_load           tokens of the busiest expert of a layer by the layer's mean; mean of the layers
    expert_load_max       the same of the layer where it is largest
    unused_experts        experts that got no token, of all layers together
    router_entropy        of a router's probabilities, in nats; mean over tokens and layers
    router_balance_loss   mean of the layers; 1 if the load is even
    router_z_loss         mean of the layers
    """
    tokens = sums.tokens.sum()
    if not tokens:
        return dict.fromkeys(ROUTER_FIGURES)
    load = sums.choices.amax(1) / sums.choices.mean(1)
    means = sums.probabilities / sums.tokens[:, None]
    rows = zip(means, sums.shares().double(), strict=True)
    figures = (
        load.mean(),
        load.max(),
        (sums.choices == 0).sum(),
        sums.entropies.sum() / tokens,
        torch.stack([balance_loss(mean, share) for mean, share in rows]).mean(),
        sums.squares.sum() / tokens,
    )
    numbers = torch.stack([figure.double() for figure in figures]).tolist()
    return dict(zip(ROUTER_FIGURES, numbers, strict=True))


ROUTER_FIGURES = (
    "expert_load",
    "expert_load_max",
    "unused_experts",
    "router_entropy",
    "router_balance_loss",
    "router_z_loss",
)
"""Keys of the figures in a row of metrics."""


class Routers:
    """The routers of a model, as its layers call them, and the sums of a step.

    Args:
        layers: numbers of the layers that have experts.
        experts: in each of them.
        adds_losses: this rank gives the losses' gradient. All tensor-parallel ranks see the same
            tokens, so one of them does.

    Example:
        routers.begin_update(device)
        with routers.passing():
            hidden = model(tokens, packing)
        hidden.sum().backward()
        routers.updated()
        row = routers.row(model.shards.sum_figures)
    """

    def __init__(self, layers: Sequence[int], experts: int, adds_losses: bool = True) -> None:
        self.losses = RouterLosses()
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._experts, self._adds_losses = experts, adds_losses
        self._tokens: Tensor | None = None
        self._shares: Tensor | None = None
        self._open: RouterSums | None = None
        self._counts = True
        self._update: RouterSums | None = None
        self._step: RouterSums | None = None
        self._idle = torch.zeros(len(self._rows), experts, dtype=torch.int64)

    def choose(
        self, layer: int, logits: Tensor, route: Route, shared_by: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Route the tokens of a layer: `route(logits)`, counted if a caller counts.

        Args:
            layer: its number.
            logits: of its router.
            route: see Route.
            shared_by: see RouterSums.add.
        """
        row = self._rows[layer]
        if self._tokens is not None and self._counts and torch.is_grad_enabled():
            shares = None if self._shares is None else self._shares[row]
            logits = _WithLosses.apply(logits, shares, self._tokens, self.losses, shared_by)
        weights, experts = route(logits)
        if self._open is not None:
            self._open.add(row, logits.detach(), experts, shared_by)
        return weights, experts

    @contextmanager
    def passing(self, counts: bool = True) -> Iterator[None]:
        """Count the tokens of a forward pass in the present update.

        Its backward pass stands outside: a layer that it computes again counts nothing twice.

        Args:
            counts: the tokens are of the batch. The tokens of an empty bin are not, and have no
                losses, in the backward pass either.
        """
        self._counts = counts
        self._open = self._update if counts else None
        try:
            yield
        finally:
            self._open = None

    def begin_update(self, device: torch.device) -> RouterSums:
        """Return the sums of a new update. The sums of an update that was not taken are dropped."""
        self._tokens = self._shares = None
        self._update = RouterSums(len(self._rows), self._experts, device)
        return self._update

    def give_losses(self, tokens: Tensor, shares: Tensor | None) -> None:
        """Give passes from here on the gradient of the losses.

        Args:
            tokens: of the update, over all ranks: a scalar.
            shares: see RouterSums.shares, over all ranks; None without a balance loss.
        """
        if self._adds_losses:
            self._tokens, self._shares = tokens, shares

    def updated(self) -> None:
        """Count the present update, which was taken, in the step's figures. Not collective."""
        self._tokens = self._shares = None
        assert self._update is not None, "no update was begun"
        if self._step is None:
            self._step = self._update
        else:
            self._step.join(self._update)
        self._update = None

    def row(self, total: Callable[[Tensor], Tensor]) -> dict[str, float | None]:
        """Return the step's figures, and begin the next step. Collective.

        Args:
            total: see RouterSums.over_ranks.
        """
        assert self._step is not None, "no update was taken"
        sums, self._step = self._step.over_ranks(total), None
        figures = router_figures(sums)
        if figures["expert_load"] is not None:
            unused = (sums.choices == 0).cpu()
            self._idle = torch.where(unused, self._idle + 1, 0)
        return figures

    def warning(self) -> str | None:
        """Return the log line for experts that got their last token IDLE_STEPS steps ago; None
        without such experts.

        Each stretch of such steps gives one line.
        """
        newly = (self._idle == IDLE_STEPS).nonzero().tolist()
        if not newly:
            return None
        layers = list(self._rows)
        named = [f"{expert} of layer {layers[row]}" for row, expert in newly[:_NAMED]]
        more = len(newly) - len(named)
        if more:
            named.append(f"{more} more")
        remedy = "--router-balance-coef 0.01 spreads the tokens"
        if given := self.losses.balance:
            remedy = f"--router-balance-coef above {given:g} spreads the tokens more"
        return (
            f"experts without a token in the last {IDLE_STEPS} steps: {', '.join(named)}; they learn "
            f"nothing; {remedy}"
        )
