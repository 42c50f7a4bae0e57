"""A batch as bins: packed tokens with everything that the loss needs, each of one forward and
backward pass on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from example_trainer.batch.token_fields import TOKEN_FIELDS
from example_trainer.models.packing import Packing

_HOST = ("lengths", "parents", "counts", "orders", "unreferenced", "reference_pass")
"""Fields that are read on the host."""


@dataclass(frozen=True)
class PackedBin:
    """Spans of one forward pass. n counts the trained tokens of all its sequences, in the order of
    the sequences and, in each, of the tokens.

    Attributes:
        tokens: [tokens] int64, span after span.
        lengths, parents: [spans] int64, see Packing.
        sources: [n] int64, which row of the decoder's output predicts each trained token.
        targets: [n] int64, the trained tokens.
        fields: [n] each, by their names in TOKEN_FIELDS; `bin[name]` is one of them.
        weights: [n] float32.
        positions: [n] int64, each one's place among the tokens of its rollout.
        counts: [sequences] int64, how many of the n belong to each sequence; none has 0.
        orders: [sequences, 2] int64, each sequence's place in the batch: group, and number within
            the group.
        unreferenced: [sequences] int64, of how many of its trained tokens the reference's logprob
            did not come along.
        reference_pass: [1] int64, not 0 if there are any of those in the bins that the ranks work
            on at the same time.
    """

    tokens: Tensor
    lengths: Tensor
    parents: Tensor
    sources: Tensor
    targets: Tensor
    fields: Mapping[str, Tensor]
    weights: Tensor
    positions: Tensor
    counts: Tensor
    orders: Tensor
    unreferenced: Tensor
    reference_pass: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["fields"]
        return own | dict(self.fields)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PackedBin:
        """Make a bin of what `tensors` returned."""
        own = {name: tensor for name, tensor in tensors.items() if name not in TOKEN_FIELDS}
        return cls(**own, fields={name: tensors[name] for name in TOKEN_FIELDS})

    def of_targets(self) -> dict[str, Tensor]:
        """The fields that have a number for each trained token."""
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name not in (*_HOST, "tokens", "sources")
        }

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedBin:
        """The same on another device, but for what says where spans and sequences lie, which is
        read on the host.
        """
        moved = {
            name: t if name in _HOST else t.to(device, non_blocking=non_blocking)
            for name, t in self.tensors().items()
        }
        return PackedBin.of(moved)

    def handed_to(self, device: torch.device) -> PackedBin:
        """As `to`, from pinned memory, so that the copy is not waited for; the allocator keeps that
        memory until it is done.
        """
        if device.type != "cuda":
            return self.to(device)
        pinned = PackedBin.of({name: t.pin_memory() for name, t in self.tensors().items()})
        return pinned.to(device, non_blocking=True)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to train on: a bin for a rank that must take part in a pass
        without work of its own.
        """
        return len(self.targets) == 0

    def packing(self) -> Packing:
        """Where its spans are, on the device of its tokens; the same object each time, which keeps
        what it has worked out.
        """
        return self._packing

    def sequences(self) -> Packing | None:
        """The trained tokens as spans, one for each sequence; None for an empty bin.

        The same object each time.
        """
        return self._sequences

    @cached_property
    def _packing(self) -> Packing:
        return Packing(self.lengths.tolist(), self.tokens.device, self.parents.tolist())

    @cached_property
    def _sequences(self) -> Packing | None:
        if not len(self.counts):
            return None
        return Packing(self.counts.tolist(), self.tokens.device)

    def device_tensors(self) -> list[Tensor]:
        """All that a pass reads on the device of the tokens, what the packings work out for it
        included.
        """
        packings = [self.packing(), self.sequences()]
        worked_out = [
            tensor
            for packing in packings
            if packing is not None
            for tensor in packing.index_tensors()
        ]
        return [
            t for t in [*self.tensors().values(), *worked_out] if t.device == self.tokens.device
        ]
