"""How a model's parameters are spread over the ranks, as the optimizer, checkpoints and the step
see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from example_trainer.models.gradients import GradientSums, Sums


class Shards:
    """One process holds every parameter whole. The base of the other ways, which spread them.

    A *local* tensor is what this rank holds of a parameter (of its float32 master, of its
    gradient); a *whole* one is what a single process would hold. Methods that say "collective" are
    called by all ranks in the same order.

    Attributes:
        spread: whether a local tensor may be less than the whole.
        masters: whether the parameters are the float32 masters themselves, with float32 gradients
            summed on them. Otherwise masters and sums are the optimizer's own.
    """

    spread = False
    masters = False

    def sums(self, model: torch.nn.Module) -> Sums:
        """Make what the backward pass adds the model's gradients to."""
        return GradientSums(model)

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's values of a parameter or of its gradient; shares their memory."""
        return parameter.detach()

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(parameter.shape)

    def take(self, name: str, whole: Tensor, block: int = 1) -> Tensor:
        """What this rank holds of a whole tensor, padding included.

        Args:
            block: elements in a row of the parameter for which the tensor has one element; here and
                below.
        """
        return whole

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor that every rank holds a part of. Collective."""
        return local

    def local_shape(self, name: str, rank: int, block: int = 1) -> tuple[int, ...]:
        """The shape of what a rank holds of a parameter, where they are spread."""
        raise NotImplementedError("one process holds every parameter whole")

    def joined(self, name: str, parts: Sequence[Tensor], block: int = 1) -> Tensor:
        """The whole tensor, from what every rank holds of it, in their order; nothing is sent."""
        return parts[0]

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
        """A batch's figures from those of the parts that this rank worked on. Collective."""
        return figures

    def release(self, model: torch.nn.Module) -> None:
        """Drop what a forward pass without a backward pass has gathered."""
