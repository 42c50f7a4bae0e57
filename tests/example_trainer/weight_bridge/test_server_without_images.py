"""Servers that hold the text part of a multimodal model alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_trainer.errors import BridgeError
from example_trainer.models.transformers_layout import transformers_geometry
from example_trainer.weight_bridge.checkpoint_sources import as_compared, frozen_sources
from example_trainer.weight_bridge.server import as_held, require_layout
from tests.geometries import geometry_of
from tests.tiny_models import make_model
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.weights.sharding import ShardSpec


def manifest(*names: str) -> Manifest:
    """The manifest of a rank with parameters of one element."""
    shards = [ShardSpec(name, (1,), (1,), ()) for name in names]
    return Manifest(0, 1, tuple(ManifestEntry(shard, "float32", "cpu") for shard in shards))


SHAPES = {name: ((1,), "float32") for name in ("text", "tower", "other")}
TOWER = frozenset(("tower",))


def test_a_frozen_tensor_may_be_absent() -> None:
    ranks = [manifest("text", "other")]
    assert as_held(SHAPES, ranks, TOWER).keys() == {"text", "other"}
    require_layout(ranks, as_held(SHAPES, ranks, TOWER))


def test_a_frozen_tensor_that_a_server_has_is_sent() -> None:
    assert as_held(SHAPES, [manifest("text", "other", "tower")], TOWER) == SHAPES


def test_a_trained_tensor_may_not_be_absent() -> None:
    ranks = [manifest("text")]
    with pytest.raises(BridgeError, match="other: the trainer has it, vLLM does not"):
        require_layout(ranks, as_held(SHAPES, ranks, TOWER))


def test_only_the_vision_tower_is_frozen(tmp_path: Path) -> None:
    tensors = make_model("Qwen2_5_VL", tmp_path)
    geometry = transformers_geometry(tmp_path)
    frozen = frozen_sources(geometry)
    assert frozen == {name for name in tensors if name.startswith("visual.")}
    shapes = {name: ((1,), "float32") for name in tensors}
    held = {tensor.name: ((1,), "float32") for tensor in geometry.tensors}
    assert as_compared(geometry, held).keys() == shapes.keys()
    assert not frozen_sources(geometry_of("Qwen3", 2, 64, 96, 4, 2, 16, 97))
