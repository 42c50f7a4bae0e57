"""The memory of a worker's keys and values: given back to the device, and taken again under the
same addresses.

CUDA graphs hold the addresses of the tensors that they were captured with, so those must not
change. On a GPU the memory comes from the allocator of vLLM's sleep mode. It takes pages away from
addresses and puts others there (CUDA's virtual memory management). The weights must not come from
it: what it maps cannot be opened by another process, and a trainer of a single copy opens them. So
sleep mode itself stays off, and of all that it knows only the keys and values are put there.

On a CPU the storage of the tensors is emptied and made again. Nothing there remembers an address.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from vllm_patching.compat.versions import UnsupportedVllm, seam, seam_missing, vllm_version

TAG = "kv_cache"
"""vLLM's name for the pool of keys and values."""
_ROUNDING = 2 << 20
"""Bytes by which the allocator rounds up. A piece of memory with more than that beside a tensor
holds other things too."""
_ALLOCATOR = "vllm.device_allocator.cumem"
_SEAMS = ("CuMemAllocator", "create_and_map", "unmap_and_release", "libcudart")


class CacheMemory:
    """The keys' and values' memory of one worker.

    Call on its main thread, while no step is in flight.
    """

    def __init__(self, worker: Any) -> None:
        """
        Args:
            worker: vLLM's, with its cache made.

        Raises:
            UnsupportedVllm: the cache is not where the supported versions have it, or its memory
                cannot be given back.
        """
        self._storages = list(_storages(worker))
        self._device = self._storages[0].device
        self._places: _Storages | _Pages = (
            _Pages(self._storages) if self._device.type == "cuda" else _Storages(self._storages)
        )
        self.bytes = self._places.bytes
        """All that is given back, or taken again."""

    def give_back(self) -> int:
        """Free what is not free yet; the content is lost. Returns the bytes freed by this call."""
        self._settle()
        freed = sum(self._places.give(place) for place in self._places.taken())
        self._settle()
        return freed

    def take_again(self) -> str:
        """Have all of it again, filled with zeros. Can be called again after it failed.

        Returns:
            empty, or why not; then what could be taken is kept.
        """
        wanted = sum(self._places.size(place) for place in self._places.away())
        if not wanted:
            return ""
        self._settle()
        free = self._free()
        short = f"{wanted:,} bytes of keys and values are wanted again on {self._device}"
        if free is not None and free < wanted:
            return (
                f"{short} and {free:,} are free: what else uses it must give back {wanted - free:,}"
            )
        try:
            for place in self._places.away():
                self._places.take(place)
        except (
            MemoryError,
            RuntimeError,
        ) as error:  # the CUDA driver's and torch's are RuntimeErrors
            told = str(error).strip().splitlines() or [type(error).__name__]
            left = self._free()
            return f"{short}{'' if left is None else f', {left:,} are free'}, and the device refuses: {told[0][:300]}"
        return ""

    def _settle(self) -> None:
        """Have every kernel done, and what torch keeps for later given to the device."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _free(self) -> int | None:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None


class _Storages:
    """On a CPU: storages that are emptied and made again."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._found = [(storage, storage.nbytes()) for storage in storages]
        self.bytes = sum(size for _, size in self._found)

    def taken(self) -> list[int]:
        return [place for place, (storage, _) in enumerate(self._found) if storage.nbytes()]

    def away(self) -> list[int]:
        return [place for place, (storage, _) in enumerate(self._found) if not storage.nbytes()]

    def size(self, place: int) -> int:
        return self._found[place][1]

    def give(self, place: int) -> int:
        storage, size = self._found[place]
        storage.resize_(0)
        return size

    def take(self, place: int) -> None:
        storage, size = self._found[place]
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(
            storage
        ).zero_()  # what is masked is multiplied by 0, which makes NaN of a NaN


class _Pages:
    """On a GPU: pages of the allocator of vLLM's sleep mode, below addresses that stay."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._module = _allocator_module()
        allocator = self._module.CuMemAllocator.get_instance()
        self._found = {}
        for storage in storages:
            data = allocator.pointer_to_data.get(storage.data_ptr())
            if data is None or data.handle[1] - storage.nbytes() > _ROUNDING:
                raise UnsupportedVllm(
                    f"vLLM ({vllm_version()}) has not made its keys and values in a pool of their "
                    "own, so their memory cannot be given back. Leave --colocate out, or ask for "
                    "a larger cache (small ones share their pages)"
                )
            self._found[storage.data_ptr()] = data
        self._away: set[int] = set()
        self.bytes = sum(data.handle[1] for data in self._found.values())

    def taken(self) -> list[int]:
        return [place for place in self._found if place not in self._away]

    def away(self) -> list[int]:
        return sorted(self._away)

    def size(self, place: int) -> int:
        return int(self._found[place].handle[1])

    def give(self, place: int) -> int:
        data = self._found[place]
        self._module.unmap_and_release(data.handle)
        self._away.add(place)
        self._note(data, asleep=True)
        return self.size(place)

    def take(self, place: int) -> None:
        data = self._found[place]
        self._module.create_and_map(data.handle)
        self._away.discard(place)
        self._note(data, asleep=False)
        self._module.libcudart.cudaMemset(place, 0, self.size(place))

    @staticmethod
    def _note(data: Any, asleep: bool) -> None:
        """vLLM's own mark, which newer versions look at before they release a piece themselves."""
        if hasattr(data, "is_asleep"):
            data.is_asleep = asleep


def pool_keys_and_values() -> None:
    """Have vLLM's GPU worker make its keys and values, and nothing else, in the pool of sleep
    mode's allocator. Call before the worker makes them.

    Raises:
        UnsupportedVllm: there is no such pool, or no such place in the worker.
    """
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    name = "_maybe_get_memory_pool_context"
    plain: Callable[..., AbstractContextManager[Any]] = seam(worker, name)
    allocator = _allocator_module().CuMemAllocator

    def context(self: Any, tag: str) -> AbstractContextManager[Any]:
        pool: AbstractContextManager[Any] = (
            allocator.get_instance().use_memory_pool(tag=tag) if tag == TAG else plain(self, tag)
        )
        return pool

    setattr(worker, name, context)


def _allocator_module() -> Any:
    try:
        module = importlib.import_module(_ALLOCATOR)
    except ImportError as error:
        raise UnsupportedVllm(
            f"this vLLM ({vllm_version()}) does not have {_ALLOCATOR}: {error}"
        ) from error
    missing = [seam for seam in _SEAMS if not hasattr(module, seam)]
    if missing or not getattr(module, "cumem_available", False):
        what = ", ".join(missing) or "the library of its allocator"
        raise UnsupportedVllm(
            f"this vLLM ({vllm_version()}) does not have {what} of {_ALLOCATOR}; leave --colocate out"
        )
    return module


def _storages(worker: Any) -> Iterator[torch.UntypedStorage]:
    """Each storage below the worker's keys and values, once.

    Raises UnsupportedVllm if there are none.
    """
    caches = getattr(getattr(worker, "model_runner", None), "kv_caches", None)
    seen: set[int] = set()
    for tensor in _tensors(caches):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage
    if not seen:
        raise UnsupportedVllm(seam_missing("its keys and values in model_runner.kv_caches"))


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for item in nested:
            yield from _tensors(item)
