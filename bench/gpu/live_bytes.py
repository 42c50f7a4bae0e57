"""Bytes of tensors that are alive, and their peak: from torch.cuda on a GPU, counted tensor by
tensor on a CPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedTensors(TorchDispatchMode):
    """Follows every storage that an operation gives out, for as long as the mode is active. Memory
    that an operation takes and frees within itself is not seen.

    Attributes:
        peak: the most bytes that were alive after any one operation since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    @property
    def alive(self) -> int:
        """Bytes now.

        Storages are asked again each time: FSDP2 empties them without giving them back.
        """
        sizes = {
            key: storage.nbytes()
            for key, ref in self._storages.items()
            if (storage := ref()) is not None
        }
        self._storages = {key: self._storages[key] for key in sizes}
        return sum(sizes.values())

    def reset(self) -> None:
        """Begin a new peak."""
        self.peak = self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, DTensor):
                leaf = leaf.to_local()
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.alive)
        return result


class Meter:
    """Bytes in use, and their peak, of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted: CountedTensors | None = None
        if device.type != "cuda":
            self._counted = CountedTensors()

    def __enter__(self) -> Meter:
        if self._counted is not None:
            self._counted.__enter__()
        self.reset()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._counted is not None:
            self._counted.__exit__(*error)

    def reset(self) -> None:
        """Begin a new peak."""
        if self._counted is not None:
            self._counted.reset()
        else:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def now(self) -> int:
        """Bytes in use."""
        if self._counted is not None:
            return self._counted.alive
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        """The most bytes in use since `reset`."""
        if self._counted is not None:
            return self._counted.peak
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def reserved(self) -> int:
        """The most bytes that torch's allocator has held of a GPU, fragments included; of a CPU the
        peak.
        """
        if self._counted is not None:
            return self._counted.peak
        return torch.cuda.max_memory_reserved(self._device)
