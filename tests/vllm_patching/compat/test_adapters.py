"""Adapters as vLLM's manager takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_patching.compat.adapters import add_adapter

GATE_UP = "model.layers.0.mlp.gate_up_proj"


class Manager:
    """Records an adapter; it lists projections as vLLM's class of the model does."""

    def __init__(self, projections: list[str]) -> None:
        self.packed_modules_mapping = {"gate_up_proj": projections}
        self.lora_index_to_id = [7]
        self.layers: dict[str, Any] = {}

    def add_adapter(self, model: Any) -> None:
        self.layers = model.loras


def added(projections: list[str]) -> dict[str, Any]:
    a, b = torch.arange(12.0).view(2, 6), torch.arange(16.0).view(8, 2)
    manager = Manager(projections)
    add_adapter(manager, 1, 2, 0.5, {GATE_UP: {"lora_A": a, "lora_B": b}})
    return manager.layers


def test_a_model_with_a_fused_layer_takes_its_adapter_as_a_whole() -> None:
    layers = added(["gate_up_proj"])
    assert list(layers) == [GATE_UP]
    assert layers[GATE_UP].lora_b.shape == (8, 2)


def test_a_model_that_lists_projections_takes_an_adapter_for_each() -> None:
    """Each has the whole lora_A and its rows of lora_B, in memory of its own."""
    layers = added(["gate_proj", "up_proj"])
    assert list(layers) == [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")]
    gate, up = layers.values()
    assert torch.equal(torch.cat((gate.lora_b, up.lora_b)), torch.arange(16.0).view(8, 2))
    assert torch.equal(gate.lora_a, up.lora_a)
    assert gate.lora_a.data_ptr() != up.lora_a.data_ptr()
    assert gate.lora_b.is_contiguous()
    assert up.lora_b.is_contiguous()
