"""Keys' and values' memory given back and taken again: really on a CPU; on a GPU's allocator by a
stand-in for it.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_patching.compat import cache_memory
from vllm_patching.compat.cache_memory import CacheMemory
from vllm_patching.compat.versions import UnsupportedVllm
from vllm_patching.worker.turns import TurnsWorkerExtension


def worker(*caches: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(kv_caches=list(caches)))


def test_views_of_one_storage_are_given_back_once_and_come_back_empty() -> None:
    raw = torch.arange(24, dtype=torch.float32)
    other = torch.ones(5, dtype=torch.float64)
    shared, alone = raw.view(2, 12), other[:3]
    memory = CacheMemory(worker([shared, raw[12:]], alone))
    assert memory.bytes == 24 * 4 + 5 * 8
    assert memory.give_back() == memory.bytes
    assert (raw.untyped_storage().nbytes(), other.untyped_storage().nbytes()) == (0, 0)
    assert memory.give_back() == 0, "it is gone already"
    assert memory.take_again() == ""
    assert shared.shape == (2, 12)
    assert not torch.cat([raw, other.float()]).any()
    shared.fill_(2)
    assert raw.sum() == 48, "they are views of the same memory again"
    assert memory.take_again() == ""
    assert raw.sum() == 48, "what is there is not made anew"


def test_a_worker_without_keys_and_values_says_so() -> None:
    with pytest.raises(UnsupportedVllm, match="kv_caches"):
        CacheMemory(worker())
    assert "kv_caches" in TurnsWorkerExtension().lockstep_cache_bytes()["error"]


class Allocator:
    """vLLM's CuMemAllocator with a device of so many bytes."""

    def __init__(self, free: int) -> None:
        self.free, self.refuses = free, False
        self.mapped: list[int] = []
        self.pointer_to_data: dict[int, Any] = {}

    def hold(self, tensor: torch.Tensor, size: int) -> None:
        handle = (0, size, tensor.data_ptr(), 0)
        self.pointer_to_data[tensor.data_ptr()] = SimpleNamespace(
            handle=handle, tag="kv_cache", is_asleep=False
        )
        self.mapped.append(tensor.data_ptr())

    def get_instance(self) -> Allocator:
        return self

    def create_and_map(self, handle: tuple[int, ...]) -> None:
        if self.refuses or self.free < handle[1]:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")
        assert handle[2] not in self.mapped, "mapped twice"
        self.free -= handle[1]
        self.mapped.append(handle[2])

    def unmap_and_release(self, handle: tuple[int, ...]) -> None:
        self.mapped.remove(handle[2])
        self.free += handle[1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator(free=0)
    zeroed = SimpleNamespace(cudaMemset=lambda place, value, size: allocator.mapped.index(place))
    module: Any = ModuleType("cumem")
    module.CuMemAllocator, module.libcudart, module.cumem_available = allocator, zeroed, True
    module.create_and_map, module.unmap_and_release = (
        allocator.create_and_map,
        allocator.unmap_and_release,
    )
    real = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: module if name == cache_memory._ALLOCATOR else real(name),
    )
    return allocator


def on_the_gpu(tensors: list[torch.Tensor], allocator: Allocator) -> CacheMemory:
    """As CacheMemory is there; torch's own GPU is left out."""
    memory = CacheMemory(worker(*tensors))
    memory._places = cache_memory._Pages(memory._storages)
    memory._free = lambda: allocator.free  # type: ignore[method-assign]
    return memory


def test_pages_are_taken_from_below_addresses_that_stay(device: Allocator) -> None:
    tensors = [torch.ones(100), torch.ones(200)]
    for tensor in tensors:
        device.hold(tensor, 4096)
    memory = on_the_gpu(tensors, device)
    assert memory.give_back() == 8192 == device.free
    assert not device.mapped
    assert all(data.is_asleep for data in device.pointer_to_data.values())
    device.free -= 1  # another process has taken it
    assert (
        "8,192 bytes of keys and values are wanted again on cpu and 8,191 are free"
        in memory.take_again()
    )
    assert not device.mapped, "all or nothing, as long as that can be seen before"
    device.free, device.refuses = 8192, True
    assert "the device refuses: CUDA Error: out of memory" in memory.take_again()
    device.refuses = False
    assert memory.take_again() == ""
    assert device.free == 0
    assert memory.take_again() == "", "what is mapped is not mapped again"
    assert sorted(device.mapped) == sorted(tensor.data_ptr() for tensor in tensors)
    assert not any(data.is_asleep for data in device.pointer_to_data.values())


def test_pages_that_hold_other_things_too_are_refused(device: Allocator) -> None:
    tensor = torch.ones(100)
    with pytest.raises(UnsupportedVllm, match="a pool of their own"):
        on_the_gpu([tensor], device)
    device.hold(tensor, 20 << 20)
    with pytest.raises(UnsupportedVllm, match="small ones share their pages"):
        on_the_gpu([tensor], device)


def test_only_keys_and_values_are_put_into_the_pool(
    device: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worker:
        def _maybe_get_memory_pool_context(self, tag: str) -> str:
            return f"none for {tag}"

    device.use_memory_pool = lambda tag: f"pool of {tag}"  # type: ignore[attr-defined]
    patched = importlib.import_module
    gpu_worker: Any = ModuleType("gpu_worker")
    gpu_worker.Worker = Worker
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: gpu_worker if name == "vllm.v1.worker.gpu_worker" else patched(name),
    )
    cache_memory.pool_keys_and_values()
    found = [
        Worker()._maybe_get_memory_pool_context(tag) for tag in ("weights", "runtime", "kv_cache")
    ]
    assert found == ["none for weights", "none for runtime", "pool of kv_cache"]
