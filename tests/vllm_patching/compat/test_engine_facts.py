"""The engine facts that a server sends to a trainer."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_patching.compat.engine import memory_share


def engine(**cache: object) -> SimpleNamespace:
    return SimpleNamespace(vllm_config=SimpleNamespace(cache_config=SimpleNamespace(**cache)))


def test_the_share_of_memory_is_known_where_it_decides() -> None:
    assert memory_share(engine(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None)) == 0.9
    assert memory_share(engine(gpu_memory_utilization=0.9)) == 0.9
    assert memory_share(engine(gpu_memory_utilization=0.1, kv_cache_memory_bytes=4 << 30)) is None
    assert memory_share(SimpleNamespace()) is None, "a parameter server holds weights alone"
