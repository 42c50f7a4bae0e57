"""Record where a model's loader puts the elements of each checkpoint tensor, and copy nothing.

The loader gets tensors without data. Views of them, casts and clones keep the name of the
checkpoint tensor and the region of it that they list. Any other computation loses it, and a copy
of its result is a problem: this model's loading is not a permutation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_patching.weights.regions import Copied, NotARegion, Region, row_major, through, whole

_CLONES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_FILLS = (
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
)


@dataclass(frozen=True)
class Recorded:
    """A copy from a checkpoint tensor to a parameter, both given by name."""

    source: str
    target: str
    copied: Copied


@dataclass
class Records:
    """A recorded load.

    Attributes:
        copies: in the loader's order.
        fills: parameters, and regions of them that the loader filled with one value.
        problems: parameters that hold something other than elements of the checkpoint's tensors,
            and the reason.
        computed: checkpoint tensors that the loader computes with, or moves by another way than
            views, casts and clones.
    """

    copies: list[Recorded] = field(default_factory=list)
    fills: list[tuple[str, Region]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Memory:
    """A tensor's memory without data, and the region of a checkpoint tensor that it stands for."""

    source: str
    region: Region
    tensor: torch.Tensor  # keeps the memory's identity from being used again


class CopyRecorder(TorchDispatchMode):
    """While it is active, nothing is written to the targets.

    Attributes:
        records: grows with each copy.
    """

    def __init__(
        self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> None:
        """
        Args:
            sources: checkpoint tensors on the meta device, by name.
            targets: parameters and buffers, by name.
        """
        super().__init__()
        self.records = Records()
        self._memories = {
            _memory(tensor): _Memory(name, row_major(tensor.shape), tensor)
            for name, tensor in sources.items()
        }
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in targets.items():
            self._targets.setdefault(_memory(tensor), (name, tensor))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.is_write and isinstance(value, torch.Tensor)
        ]
        for tensor in written:
            if _memory(tensor) in self._targets:
                self._write(func, tensor, args)
                return tensor
            if memory := self._memories.pop(_memory(tensor), None):
                self.records.computed.add(memory.source)
        if func in _CLONES and _memory(args[0]) in self._memories:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            result = func(*args, **kwargs)
            self._remember(result, args[0])
            return result
        self._watch_reads(func, args)
        return func(*args, **kwargs)

    def _write(self, func: Any, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        name, target = self._targets[_memory(tensor)]
        region = _region(tensor, -target.storage_offset())
        if func in _FILLS:
            self.records.fills.append((name, region))
            return
        if func is not torch.ops.aten.copy_.default:
            self.records.problems[name] = f"the loader computes it by {func}"
            return
        source = args[1]
        memory = self._memories.get(_memory(source))
        if memory is None or source.dtype.itemsize != memory.tensor.dtype.itemsize:
            self.records.problems[name] = "the loader copies a computed value into it"
            return
        pair = Copied(_region(source.expand(tensor.shape)), region)
        try:
            copied = through(pair, memory.region)
        except NotARegion as error:
            self.records.problems[name] = f"the loader copies uneven elements into it: {error}"
            return
        if copied.source.size:
            self.records.copies.append(Recorded(memory.source, name, copied))

    def _remember(self, clone: torch.Tensor, original: torch.Tensor) -> None:
        """Note the region that a clone stands for, in the order of the clone's memory."""
        memory = self._memories[_memory(original)]
        if original.dtype.itemsize != memory.tensor.dtype.itemsize:
            return
        try:
            copied = whole(through(Copied(_region(original), _region(clone)), memory.region))
        except NotARegion:
            return
        if copied.target.strides == row_major(copied.target.shape).strides:
            self._memories[_memory(clone)] = _Memory(memory.source, copied.source, clone)

    def _watch_reads(self, func: Any, args: Iterable[Any]) -> None:
        """Note parameters and checkpoint tensors that the loader may derive something from."""
        if any(value.alias_info is not None for value in func._schema.returns):
            return  # a view
        for memory in (_memory(value) for value in args if isinstance(value, torch.Tensor)):
            if memory in self._targets:
                name, _ = self._targets[memory]
                self.records.problems[name] = f"the loader computes with it by {func}"
            elif memory in self._memories:
                self.records.computed.add(self._memories[memory].source)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _region(tensor: torch.Tensor, shift: int = 0) -> Region:
    return Region(int(tensor.storage_offset()) + shift, tuple(tensor.shape), tensor.stride())
