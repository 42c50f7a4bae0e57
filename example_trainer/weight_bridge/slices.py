"""The slices of the trainer's parameters that one of vLLM's ranks gets: where they lie, how they are packed and summed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_patching.protocol.checksum import WeightSummary, WeightSums
from vllm_patching.protocol.manifest import FlatSlice, Manifest, flat_layout, parts, source_view
from vllm_patching.transport.groups import PART_BYTES


class WeightSlices:
    """Contiguous tensors, one for each slice of a rank's layout, in its order.

    A slice that is contiguous in the trainer's parameter (rows) is sent from where it is. The others (columns, for
    tensor-parallel ranks), those of parameters of another dtype than the layout's, and all slices of parameters that no process
    holds whole, are packed first, each into a buffer that stays for as long as the object does: `packed_bytes` in all.

    Attributes:
        digest: identifies the layout; ranks of several servers with the same one get the same tensors.
        num_bytes: payload bytes.
        parts: ranges of slices that are handed over at once.
    """

    def __init__(self, manifest: Manifest, parameters: Mapping[str, torch.Tensor], whole: bool, device: torch.device) -> None:
        """
        Args:
            manifest: of the rank that receives.
            parameters: the trainer's, by name.
            whole: whether each is a plain tensor that holds all of it, and stays where it is.
            device: where the packed slices go.
        """
        self.digest = manifest.digest()
        layout, _ = flat_layout(manifest)
        self.parts = parts(layout, PART_BYTES)
        self.num_bytes = sum(item.num_bytes for item in layout)
        self._by_name: dict[str, list[tuple[FlatSlice, torch.Tensor]]] = {}
        named: list[tuple[str, torch.Tensor]] = []
        for item in layout:
            tensor = source_view(item, parameters[item.name].data) if whole else None
            if tensor is None or tensor.dtype != item.dtype or not tensor.is_contiguous():
                tensor = torch.empty(item.shape, dtype=item.dtype, device=device)
                self._by_name.setdefault(item.name, []).append((item, tensor))
            named.append((item.name, tensor))
        self._named = named
        self._sums = WeightSums(named)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(item.num_bytes for slices in self._by_name.values() for item, _ in slices)

    @property
    def packed_names(self) -> Sequence[str]:
        """The parameters that have slices to be packed."""
        return list(self._by_name)

    def pack(self, name: str, full: torch.Tensor) -> None:
        """Copy the slices of a parameter that are not sent from where they are.

        Args:
            full: the whole parameter, of the shape that the manifest calls full_shape.
        """
        with torch.no_grad():
            for item, buffer in self._by_name.get(name, ()):
                buffer.copy_(source_view(item, full))

    def summary(self) -> WeightSummary:
        """Checksum of what is to be sent, and the first parameter that is not finite."""
        return self._sums.all()

    def tensors(self, first: int, last: int) -> list[torch.Tensor]:
        """The tensors of a range of slices."""
        return [tensor for _, tensor in self._named[first:last]]
