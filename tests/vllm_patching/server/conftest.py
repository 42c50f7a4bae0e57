"""A server of two ranks whose time is virtual."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.virtual_time import VirtualLoop, virtual_time
from tests.vllm_patching.server.bridge_world import CLOCKED, World


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    """An event loop whose waits take no time."""
    with virtual_time(*CLOCKED) as made:
        yield made


@pytest.fixture
def world(loop: VirtualLoop, tmp_path: Path) -> World:
    """A server on that loop."""
    return World(loop, tmp_path, ranks=2)
