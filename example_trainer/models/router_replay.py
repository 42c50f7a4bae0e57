"""Forward a mixture with the experts that the sampler chose.

Sampler and trainer round differently, so their routers choose different experts for some tokens.
Here each token goes to the sampler's experts (`Packing.routed`). The weights of these experts are
probabilities of the trainer's own router, so the router still learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from example_trainer.models.decoder import Choose, Routed
from example_trainer.models.packing import Packing


class RouterReplay:
    """The choice of experts in place of the layers' own; see decoder.Routing.

    Args:
        layers: numbers of the layers that have experts.
        count: experts of a token.
    """

    def __init__(self, layers: Sequence[int], count: int) -> None:
        self._first = {layer: row * count for row, layer in enumerate(layers)}
        self._count, self._counts = count, False
        self._update: Tensor | None = None
        self._step: Tensor | None = None

    def __call__(self, layer: int, logits: Tensor, packing: Packing, choose: Choose) -> Routed:
        """Return the sampler's experts; a token without any goes to the layer's own choice."""
        if packing.routed is None:
            return choose(logits)
        with torch.no_grad():
            _, own = choose(logits)
        first = self._first[layer]
        routed = packing.routed[:, first : first + self._count].long()
        replayed = routed[:, :1] >= 0
        if self._counts:
            self._count_others(routed, own, replayed[:, 0], packing.shared_by)
        return choose(logits, chosen=torch.where(replayed, routed, own))

    def _count_others(
        self, routed: Tensor, own: Tensor, replayed: Tensor, shared_by: Tensor | None
    ) -> None:
        """Count the tokens whose own experts differ, once for each sequence that has them. The host
        does not wait.
        """
        others = (routed.sort(-1).values != own.sort(-1).values).any(-1) & replayed
        if shared_by is not None:
            others, replayed = others * shared_by, replayed * shared_by
        if self._update is None:
            self._update = torch.zeros(2, dtype=torch.float64, device=routed.device)
        self._update += torch.stack((others.sum(), replayed.sum()))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of a forward pass. Its backward pass stands outside."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def begin_update(self) -> None:
        """Count from here on for a new update, and drop the counts of one that was not taken."""
        self._update = None

    def updated(self) -> None:
        """Count the present update, which was taken, in the step's figure. Not collective."""
        if self._update is not None:
            self._step = self._update if self._step is None else self._step + self._update
        self._update = None

    def row(
        self, total: Callable[[Tensor], Tensor], device: torch.device
    ) -> dict[str, float | None]:
        """Return the step's figure, and begin the next step. Collective.

        Args:
            total: adds a float64 vector up over the ranks; may change it.
            device: of the model.
        """
        sums, self._step = self._step, None
        if sums is None:
            sums = torch.zeros(2, dtype=torch.float64, device=device)
        others, tokens = total(sums).tolist()
        return {"rerouted_share": others / tokens if tokens else None}
