"""Parameters over ranks: layers that tensor-parallel ranks split, float32 sums of gradients, and the
spread of parameters as optimizer and checkpoints see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vllm_patching.weights.sharding import vocabulary_range

# Layers split over tensor-parallel ranks: what goes over the wire in a forward and in a backward
# pass.
#
# The f and g of Megatron-LM (arXiv:1909.08053, section 3). Between two layers every rank holds the
# same hidden states, and the same gradient of them; within a layer it holds a part.


class Split:
    """This rank's place in a split layer. `Split()` is the whole layer.

    Attributes:
        rank: 0 to size - 1.
        size: over how many ranks layers are split; vLLM's tensor-parallel degree.
        ordered: sums over ranks are taken in the order of the ranks, so that equal inputs give
            equal bits.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        ordered: bool = False,
    ) -> None:
        self.rank, self.size, self.group, self.ordered = rank, size, group, ordered

    def enter(self, x: Tensor) -> Tensor:
        """f: what every rank holds goes into its part of a layer; the parts' gradients add up."""
        entered: Tensor = x if self.size == 1 else _Enter.apply(x, self)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """g: the sum of the parts' outputs, on every rank; each part gets the sum's gradient."""
        left: Tensor = x if self.size == 1 else _Leave.apply(x, self)
        return left

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place, without gradient."""
        if self.size > 1 and self.ordered:
            add_in_order(x, self.group)
        elif self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """The largest over ranks, in place, without gradient."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's contiguous tensor of one common shape, by rank."""
        if self.size == 1:
            return [x]
        rows = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(rows, x, group=self.group)
        return rows

    def gather_parts(self, parts: Tensor) -> Tensor:
        """Parts [k, rows, outputs] of every rank in the order of the ranks, without gradient.

        Returns:
            [size * k, rows, outputs].
        """
        if self.size == 1:
            return parts
        gathered = parts.new_empty(self.size * len(parts), *parts.shape[1:])
        dist.all_gather_into_tensor(gathered, parts.contiguous(), group=self.group)
        return gathered

    def vocabulary_range(self, vocab_size: int) -> tuple[int, int]:
        """The token ids whose rows this rank holds: first, and one past the last.

        The rows after them are padding.
        """
        if self.size == 1:
            return 0, vocab_size
        first, end, _ = vocabulary_range(vocab_size, self.rank, self.size)
        return first, end


def add_in_order(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of every rank's contiguous tensor of one shape, in place, without gradient.

    It is taken in float32 (float64 for float64) in the order of the ranks and rounded once. An
    all-reduce chooses its order by the number of elements and the machine, and rounds 16 bits at
    each hop.
    """
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return x.copy_(sum_in_order(parts))


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors in their order, in float32 (float64 for float64)."""
    total = wide(parts[0]).clone()
    for part in parts[1:]:
        total += part
    return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        return ctx.split.total(total), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        return split.total(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


# float32 sums of gradients, to which the backward pass itself adds.
#
# A parameter's gradient over a step is the sum over many passes. A gradient of each pass in the
# parameter's dtype would have to be added up. That costs a pass over all of them, and a rounding,
# every time. Instead the matrix product that makes it adds to the float32 sum (cuBLAS and our
# kernels do so without another pass). Autograd sees no gradient of the parameter at all.

Total = Callable[[], Tensor]
"""Returns the float32 sum that a parameter's gradient is added to, in the parameter's shape; zeros
at first."""

_HEAD_OF_TIED = ":as output matrix"


class Sums(Protocol):
    """Where the backward pass adds gradients."""

    def total(self, parameter: Tensor, as_head_of_tied: bool = False) -> Total | None:
        """Return where the gradient of a parameter is summed; None if it is frozen.

        Args:
            as_head_of_tied: the parameter is the embedding, used as output matrix.
        """

    def take(self) -> dict[str, Tensor]:
        """Return the sums that are not on the parameters, by name, and begin new ones."""


class PassGradients:
    """float32 gradients of one backward pass, left on the parameters for FSDP2 to reduce.

    FSDP2 gathers float32 parameters in the dtype that the model computes in. Autograd would round
    their gradients to that dtype before the ranks' gradients are added. So the backward pass adds
    to a float32 `grad` of the gathered parameter instead.
    """

    def total(self, parameter: Tensor, as_head_of_tied: bool = False) -> Total | None:
        """See Sums.total. A tied matrix has one sum for its two uses."""
        if not parameter.requires_grad:
            return None
        parameter.grad_dtype = _sum_dtype(parameter)
        return partial(_gradient_of, parameter)

    def take(self) -> dict[str, Tensor]:
        """Return nothing: FSDP2 leaves the reduced gradients on the sharded parameters."""
        return {}


def _gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = _zeros(parameter)
    return parameter.grad


class GradientSums:
    """The sums of one optimizer step, each made when it is first added to.

    Example:
        model.arithmetic.sums = sums = GradientSums(model)
        loss(model(tokens, packing)).backward()      # as often as there are microbatches
        for name, gradient in sums.take().items(): ...

    Args:
        model: whose trainable parameters are summed for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sums: dict[str, Tensor] = {}

    def total(self, parameter: Tensor, as_head_of_tied: bool = False) -> Total | None:
        """See Sums.total.

        The two uses of a tied matrix are summed apart. The order in which they are added must not
        depend on how a batch is packed.
        """
        if not parameter.requires_grad:
            return None
        return partial(
            self._of, self._names[id(parameter)] + _HEAD_OF_TIED * as_head_of_tied, parameter
        )

    def take(self) -> dict[str, Tensor]:
        """Everything summed so far, by the parameter's name; the next addition begins at 0."""
        sums, self._sums = self._sums, {}
        for key in [key for key in sums if key.endswith(_HEAD_OF_TIED)]:
            head, name = sums.pop(key), key.removesuffix(_HEAD_OF_TIED)
            sums[name] = sums[name].add_(head) if name in sums else head
        return sums

    def _of(self, key: str, parameter: Tensor) -> Tensor:
        if key not in self._sums:
            self._sums[key] = _zeros(parameter)
        return self._sums[key]


def deliver(
    parameter: Tensor, total: Total | None, add: Callable[[Tensor], object]
) -> Tensor | None:
    """Have a gradient added to where it belongs.

    Args:
        add: adds it in place to a tensor of the parameter's shape, in float32 (float64 for a
            float64 parameter).

    Returns:
        what autograd is to get: nothing if there is a `total`, else the gradient in the parameter's
        dtype.
    """
    if total is not None:
        add(total())
        return None
    fresh = _zeros(parameter)
    add(fresh)
    return fresh.to(parameter.dtype)


def add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """total [outputs, inputs] += dyᵀ x, in place, for dy [rows, outputs] and x [rows, inputs] of
    any floating dtype.
    """
    if (
        dy.is_cuda and dy.dtype != total.dtype
    ):  # rounded nowhere: cuBLAS adds the products of 16 bits to the total
        torch.addmm(total, dy.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(wide(dy).t(), wide(x))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: Total) -> Tensor:
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.total().add_(gradient)
        return None, None


def summed(parameter: Tensor, total: Total | None) -> Tensor:
    """The parameter, whose gradient goes to the total if there is one."""
    tied: Tensor = parameter if total is None else _Summed.apply(parameter, total)
    return tied


def wide(x: Tensor) -> Tensor:
    """float32, or float64 for float64: what sums are taken in."""
    return x if x.dtype == torch.float64 else x.float()


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=_sum_dtype(parameter), device=parameter.device)


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a parameter that a rank holds, and how many.

    The rows are cut as `torch.chunk` cuts them: the last chunks are shorter, or empty.

    Args:
        rows: of the whole parameter.
        size: over how many ranks they are spread.
    """
    chunk = -(-rows // size)
    first = min(rank * chunk, rows)
    return first, min(chunk, rows - first)


class Shards:
    """One process holds every parameter whole. The base of the other ways, which spread them.

    A *local* tensor is what this rank holds of a parameter (of its float32 master, of its
    gradient). A *whole* one is what a single process would hold. Methods marked "collective" are
    called by all ranks in the same order.

    Attributes:
        spread: whether a local tensor may be less than the whole.
        masters: whether the parameters are the float32 masters themselves, with float32 gradients
            summed on them. Otherwise masters and sums are the optimizer's own.
        layout: the ranks in words. It decides the order of sums.
    """

    spread = False
    masters = False
    layout = "one rank"

    def sums(self, model: torch.nn.Module) -> Sums:
        """Make what the backward pass adds the model's gradients to."""
        return GradientSums(model)

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's values of a parameter or of its gradient; shares their memory."""
        return parameter.detach()

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(parameter.shape)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a whole parameter that is spread."""
        raise NotImplementedError("one process holds every parameter whole")

    def take(self, name: str, whole: Tensor, block: int = 1) -> Tensor:
        """Return this rank's part of a whole tensor, padding included.

        Args:
            block: elements in a row of the parameter for which the tensor has one element; here and
                below.
        """
        return whole

    def rows(self, name: str) -> range | None:
        """The rows of the whole parameter that a local tensor is made of, one below the other; None
        if it is made in another way.
        """
        return None

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor that every rank holds a part of. Collective."""
        return local

    def local_shape(self, name: str, rank: int, block: int = 1) -> tuple[int, ...]:
        """The shape of what a rank holds of a parameter, where they are spread."""
        raise NotImplementedError("one process holds every parameter whole")

    def joined(self, name: str, parts: Sequence[Tensor], block: int = 1) -> Tensor:
        """The whole tensor, from what every rank holds of it, in their order; nothing is sent."""
        return parts[0]

    def ranges(self, name: str, local: Tensor) -> Sequence[tuple[int, Tensor]]:
        """Contiguous ranges of the whole tensor, each behind the number of its first element, such
        that all ranks' ranges together hold each element exactly once. Collective.
        """
        return [(0, local)]

    def owned(self, name: str, local: Tensor) -> Sequence[Tensor]:
        """Parts of a local tensor such that all ranks' parts together hold each element of the
        whole exactly once.
        """
        return [local]

    def total(self, values: Tensor) -> Tensor:
        """The sum of the ranks' values, where each contributes a part.

        Collective; may change `values`.
        """
        return values

    def norms(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """L2 norm of each whole tensor (float64, in the mapping's order) from this rank's local
        ones. Collective.
        """
        owned = [
            (row, column, part)
            for row, (name, local) in enumerate(tensors.items())
            for column, part in enumerate(self.owned(name, local))
        ]
        device = next(iter(tensors.values())).device
        squares = torch.zeros(len(tensors), dtype=torch.float64, device=device)
        if owned:
            rows, columns, parts = (list(values) for values in zip(*owned, strict=True))
            norms = torch.stack(torch._foreach_norm(parts)).double()
            table = squares.new_zeros(
                len(tensors), max(columns) + 1
            )  # summed by rows: adding by index has no fixed order
            table[rows, columns] = norms.square()
            squares = table.sum(dim=1)
        return self.total(squares).sqrt()

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Make local gradients, in place, what they are in the whole gradient. Collective."""

    def sum_figures(self, figures: Tensor) -> Tensor:
        """A batch's figures from the figures of this rank's parts. Collective."""
        return figures

    def release(self, model: torch.nn.Module) -> None:
        """Drop what a forward pass without a backward pass has gathered."""
