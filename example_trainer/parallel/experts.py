"""Expert parallelism: each rank holds some experts of every layer, and tokens travel to them.

With N ranks, rank r holds the experts from r · E / N on. A layer sends each token's row to the
ranks of its experts, and their outputs come back:

    token ── its choices ──► rows ── all-to-all ──► experts ── all-to-all ──► outputs ──► weighted sum

The rank of a token adds the outputs itself, in the order of the choices, by the kernel that one
rank adds them with. An output does not depend on the rows beside it. So the result has the bits of
one rank, whatever N is. The gradient of an expert is summed over its rows in the order of ranks and
tokens.

Where there are more trainer ranks than N, ranks that hold the same experts share them by FSDP2. A
rank then keeps the same experts as without expert parallelism, and checkpoints, masters and weight
updates are the same. Only the forward and the backward pass differ: FSDP2 gathers the other ranks'
experts, and expert parallelism sends tokens instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from example_trainer.errors import ConfigError
from example_trainer.models.decoder import Arithmetic, Decoder, Experts, Mixture
from example_trainer.models.packing import Packing
from example_trainer.models.shards import Split, Total
from vllm_patching.batch_invariant import ops as kernels
from vllm_patching.weights.families import Geometry


def require_expert_parallel(count: int, ranks: int, geometry: Geometry) -> None:
    """Refuse a number of ranks that share the experts.

    Args:
        count: --expert-parallel.
        ranks: of the trainer.

    Raises:
        ConfigError: names the numbers that fit.
    """
    if count == 1:
        return
    experts = geometry.num_experts
    if not geometry.sparse_layers:
        raise ConfigError(
            f"--expert-parallel {count} spreads experts over ranks, and this model "
            f"({geometry.architecture}) has none that this trainer computes: leave it out"
        )
    if experts % ranks:
        raise ConfigError(
            f"--expert-parallel {count}: the {experts} experts of a layer cannot be divided among "
            f"{ranks} trainer rank(s); {_fitting_ranks(count, experts)}leave it out"
        )
    if ranks % count:
        fitting = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise ConfigError(
            f"--expert-parallel {count} does not divide the {ranks} trainer rank(s); give "
            f"{_one_of(fitting)}"
        )


def _fitting_ranks(count: int, experts: int) -> str:
    """Return what to give so that ranks can share the experts, or nothing if no number fits."""
    fitting = [number for number in range(2, experts + 1) if experts % number == 0]
    if multiples := [number for number in fitting if number % count == 0]:
        return f"start {_one_of(multiples)} ranks (--ranks), or "
    if fitting:
        return f"give {_one_of(fitting)} and start as many ranks (--ranks), or "
    return ""


def _one_of(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    if not most:
        return last
    return f"{', '.join(most)} or {last}"


def expert_mesh(device: torch.device, ranks: int, count: int) -> DeviceMesh:
    """Return the ranks as a mesh. Collective.

    Ranks along `experts` share the experts of a layer. Ranks along `replicas` hold the same
    experts. Replicas are neighbours, so a rank keeps the experts that FSDP2 gives it over all
    ranks.
    """
    return init_device_mesh(
        device.type, (count, ranks // count), mesh_dim_names=("experts", "replicas")
    )


@dataclass(frozen=True)
class Exchange:
    """The ranks that share the experts of a layer.

    Attributes:
        group: of `size` ranks, this one among them.
        experts: that each of them holds.
    """

    group: dist.ProcessGroup
    size: int
    experts: int

    def way(self, owners: Tensor) -> Way:
        """Count the rows that each rank sends to each. Waits for the device. Collective.

        Args:
            owners: [rows] int64, the rank that each row goes to.
        """
        sent = owners.bincount(minlength=self.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        numbers: list[list[int]] = torch.stack((sent, received)).tolist()
        return Way(numbers[0], numbers[1], self.group)


@dataclass(frozen=True)
class Way:
    """The rows that go to each rank of a group, and that come from each.

    Attributes:
        sent, received: numbers of rows, by rank.
    """

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def send(self, rows: Tensor) -> Tensor:
        """Return the rows that arrive. Collective."""
        arrived = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(
            arrived, rows.contiguous(), self.received, self.sent, group=self.group
        )
        return arrived

    def back(self) -> Way:
        """Return the way of the answers."""
        return Way(self.received, self.sent, self.group)


class Apart(Split):
    """A split of one rank that leaves the parts of the experts' outputs apart, in `kept`."""

    kept: Tensor | None = None

    def gather_parts(self, parts: Tensor) -> Tensor:
        """Return the parts as they are; see Split.gather_parts."""
        self.kept = parts
        return parts


class _Sent(torch.autograd.Function):
    """Rows [sent, width] of this rank go to others; [received, width] of theirs come. Their
    gradients go back.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.send(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.way.back().send(gradient), None


class _Rows(torch.autograd.Function):
    """The row of each choice, [tokens · count, width] of x [tokens, width]. The gradients of a
    token's rows are added in the order of its choices.

    `order` has the choices (token · count + slot) in the order in which they are sent. `places` has
    the place of each choice in that order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = count
        return x.index_select(0, order // count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        ones = torch.ones(
            (len(places) // ctx.count, ctx.count), dtype=torch.float32, device=gradient.device
        )
        return kernels.weighted_sum(gradient, places, ones), None, None, None


class _Combined(torch.autograd.Function):
    """The weighted sum of outputs that go back to the ranks of their tokens, by the kernels of one
    rank.

    With several parts, each part of an output is rounded and summed over a token's choices by
    itself, and then the parts are added. All parts have the gradient of their sum.

    `outputs` [received, width] has the gradient, and `parts` [parts, received, width] the values.
    `places` is as in `_Rows`, and `weights` are [tokens, count] float32. The result is [tokens,
    width].
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, parts: Tensor, places: Tensor, weights: Tensor, way: Way
    ) -> Tensor:
        back = way.back()
        rows = torch.stack([back.send(part) for part in parts])
        ctx.save_for_backward(rows, places, weights)
        ctx.way = way
        sums = [kernels.weighted_sum(part, places, weights) for part in rows]
        if len(sums) == 1:
            return sums[0]
        return kernels.add_parts(torch.stack(sums))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor, None]:
        rows, places, weights = ctx.saved_tensors
        wide, places = gradient.to(weights.dtype), places.view_as(weights)
        slope, d_weights = torch.empty_like(rows[0]), torch.zeros_like(weights)
        # Choice after choice: all at once would take float32 copies of every row.
        for slot, (own, weight) in enumerate(zip(places.unbind(1), weights.unbind(1), strict=True)):
            slope[own] = (wide * weight[:, None]).to(rows.dtype)
            for part in rows:
                d_weights[:, slot] += (wide * part[own]).sum(-1)
        return ctx.way.send(slope), None, None, d_weights, None


class _NoRows(torch.autograd.Function):
    """The outputs for no rows. The experts' gradients are zeros, which FSDP2 has to reduce."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, w13: Tensor, w2: Tensor, totals: tuple[Total | None, Total | None]
    ) -> Tensor:
        ctx.save_for_backward(w13, w2)
        ctx.totals = totals
        return rows.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros: list[Tensor | None] = []
        for weight, total, needed in zip(
            ctx.saved_tensors, ctx.totals, ctx.needs_input_grad[1:3], strict=True
        ):
            if total is not None:
                total()
            zeros.append(torch.zeros_like(weight) if needed and total is None else None)
        return gradient, *zeros, None


class SpreadExperts(nn.Module):
    """This rank's experts of a layer, which compute rows of all ranks of an exchange.

    Args:
        whole: the layer's experts, without values yet.
    """

    def __init__(self, whole: Experts, exchange: Exchange) -> None:
        super().__init__()
        self.arithmetic: Arithmetic = whole.arithmetic
        self._exchange = exchange
        self.w13_weight = nn.Parameter(whole.w13_weight.detach()[: exchange.experts].clone())
        self.w2_weight = nn.Parameter(whole.w2_weight.detach()[: exchange.experts].clone())

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, packing: Packing) -> Tensor:
        """Return the weighted sum of the chosen experts; see `Operations.experts`. Collective."""
        exchange, count = self._exchange, chosen.shape[1]
        flat = chosen.reshape(-1)
        owners = flat // exchange.experts
        # Sorted by rank alone: a rank gets rows in the order of the tokens, as one rank has them.
        order = owners.sort(stable=True).indices
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        way = exchange.way(owners)
        tags = packing.numbers[order // count] * exchange.experts + flat[order] % exchange.experts
        rows: Tensor = _Rows.apply(x, order, places, count)
        rows = _Sent.apply(rows, way)
        outputs, parts = self._computed(rows, way.send(tags), way.received)
        summed: Tensor = _Combined.apply(outputs, parts, places, weights, way)
        return summed

    def _computed(self, rows: Tensor, tags: Tensor, received: list[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs of this rank's experts for rows, before their weights. They are
        returned as a tensor with their gradient, and as [parts, rows, width] without one.

        Args:
            tags: span · experts + expert of each row.
            received: rows from each rank.
        """
        total = self.arithmetic.total
        totals = total(self.w13_weight), total(self.w2_weight)
        if not len(rows):
            nothing: Tensor = _NoRows.apply(rows, self.w13_weight, self.w2_weight, totals)
            return nothing, nothing.detach().expand(self.arithmetic.plan.parts, *rows.shape)
        numbers = torch.tensor(received, device=tags.device)
        senders = torch.arange(len(received), device=tags.device).repeat_interleave(numbers)
        spans = torch.stack((senders, tags // self._exchange.experts))
        lengths = spans.unique_consecutive(dim=1, return_counts=True)[1]
        # A weight of 1 leaves an output as it is.
        ones = torch.ones((len(rows), 1), dtype=torch.float32, device=rows.device)
        experts = (tags % self._exchange.experts)[:, None]
        apart, parts = Apart(), self.arithmetic.plan.parts
        outputs = self.arithmetic.ops.experts(
            rows,
            ones,
            experts,
            self.w13_weight,
            self.w2_weight,
            Packing(lengths.tolist(), rows.device),
            totals,
            apart,
            parts,
        )
        if apart.kept is None:
            return outputs, outputs.detach()[None]
        return outputs, apart.kept


def spread_experts(model: Decoder, mesh: DeviceMesh) -> list[SpreadExperts]:
    """Leave each layer of a model without values only this rank's experts.

    Args:
        mesh: see expert_mesh.

    Returns:
        The experts of all layers, for FSDP2 to share among the replicas.
    """
    along = mesh["experts"]
    own = model.geometry.num_experts // along.size()
    exchange = Exchange(along.get_group(), along.size(), own)
    spread = []
    for module in list(model.modules()):
        if isinstance(module, Mixture) and isinstance(module.experts, Experts):
            module.experts = own_experts = SpreadExperts(module.experts, exchange)
            spread.append(own_experts)
    return spread
