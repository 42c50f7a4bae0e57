"""LoRA adapters in vLLM."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing

if TYPE_CHECKING:
    import torch


def lora_request(name: str, adapter_id: int, path: str) -> Any:
    """Return the object with which a request is sampled with an adapter."""
    return importlib.import_module("vllm.lora.request").LoRARequest(name, adapter_id, path)


def adapter_manager(worker: Any) -> Any:
    """The part of a worker that holds its LoRA adapters.

    Raises:
        UnsupportedVllm: it is not where the supported versions have it.
    """
    manager = getattr(getattr(worker.model_runner, "lora_manager", None), "_adapter_manager", None)
    seams = (
        "add_adapter",
        "activate_adapter",
        "remove_adapter",
        "list_adapters",
        "lora_index_to_id",
        "packed_modules_mapping",
        "capacity",
    )
    if not all(hasattr(manager, seam) for seam in seams):
        raise UnsupportedVllm(seam_missing("model_runner.lora_manager._adapter_manager"))
    return manager


def add_adapter(
    manager: Any,
    adapter_id: int,
    rank: int,
    scale: float,
    projections: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Give a worker's manager an adapter from tensors, without vLLM's own reading of files.

    The manager multiplies each lora_B by the scale, in place. The adapter is put into a slot at
    once if one is free; else vLLM does that when the adapter is first used.
    """
    layer = importlib.import_module("vllm.lora.lora_weights").LoRALayerWeights
    model = importlib.import_module("vllm.lora.lora_model").LoRAModel
    layers = {
        name: layer(name, rank, 1, matrices["lora_A"], matrices["lora_B"], scaling=scale)
        for fused, adapter in projections.items()
        for name, matrices in _apart(manager, fused, adapter)
    }
    manager.add_adapter(model(adapter_id, rank, layers))
    if None in manager.lora_index_to_id:
        manager.activate_adapter(adapter_id)


def _apart(
    manager: Any, name: str, matrices: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield an adapter as vLLM's model wants it. A fused tensor such as `gate_up_proj` has it as a
    whole or, in models whose class lists the projections, with one adapter for each.
    """
    path, _, module = name.rpartition(".")
    projections = manager.packed_modules_mapping.get(module, [module])
    if len(projections) == 1:
        yield name, matrices
        return
    for projection, rows in zip(
        projections, matrices["lora_B"].chunk(len(projections)), strict=True
    ):
        # The manager scales each lora_B in place, and each lora_A belongs to one adapter.
        apart = {"lora_A": matrices["lora_A"].clone(), "lora_B": rows.clone()}
        yield f"{path}.{projection}", apart
