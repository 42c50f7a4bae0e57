"""bench/gpu/ceiling.py in pairs, with real processes: what is sent is what the receivers hold
together.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.gpu import ceiling
from bench.gpu.shapes import shard_shapes

pytestmark = pytest.mark.nightly


def test_pairs_send_each_receiver_its_shards(tmp_path: Path) -> None:
    found = ceiling.measure(
        "tiny", ["cpu"] * 4, tmp_path, repeats=2, seconds=240, gibibyte=1 << 16, pairs=True
    )
    assert "not_measured" not in found
    patterns = found["patterns"]
    assert patterns["broadcast_1gib"]["bytes"] == 2 << 16
    elements = sum(math.prod(shape) for rank in range(2) for shape in shard_shapes("tiny", rank, 2))
    assert patterns["shards_sent_coalesced"]["bytes"] == 4 * elements  # float32 on a CPU
    assert found["model_gb_per_s"] == patterns["shards_sent_coalesced"]["gb_per_s"] > 0
