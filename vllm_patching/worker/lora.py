"""The methods for LoRA in each vLLM worker, called on its main thread through collective_rpc between
two model steps.

vLLM imports this module in the worker before it builds the model and adds the class to the worker's
bases. So every method is prefixed: the names share one space with vLLM's own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_patching.compat.adapters import adapter_manager, add_adapter
from vllm_patching.compat.cpu_seeds import take_back_cpu_draws
from vllm_patching.compat.cpu_weights import keep_cpu_weights_plain
from vllm_patching.compat.loggers import worker_logger
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import dtype_name, flat_layout, local_view
from vllm_patching.protocol.messages import LoraLoad, LoraSetup, LoraWorker
from vllm_patching.transport.adapter_file import (
    AdapterError,
    AdapterFile,
    expected_shapes,
    open_adapter,
)
from vllm_patching.weights.families import Geometry
from vllm_patching.worker.parameters import build_manifest, own_parameters, tensor_parallel

logger = worker_logger("lockstep.lora")

keep_cpu_weights_plain()
take_back_cpu_draws()


class LoraWorkerExtension:
    """Mixed into vLLM's worker.

    Attributes are made by lora_setup, since vLLM never calls an __init__ of ours.
    """

    def lora_setup(self) -> LoraSetup:
        """Look at the base model and at the places for adapters.

        Returns:
            {"manifest", "checksum" of the base weights, "dtype" of adapters, "max_rank", "slots",
            "capacity"}
        """
        manager = adapter_manager(self)
        config = self.vllm_config.model_config.hf_config  # type: ignore[attr-defined]
        self._lora_geometry = Geometry.from_config(config.to_dict())
        self._lora_config = manager.lora_config
        parameters = own_parameters(self.get_model())  # type: ignore[attr-defined]
        manifest = build_manifest(self._lora_geometry, parameters, *tensor_parallel())
        self._lora_device = next(iter(parameters.values())).device
        self._lora_staging = self._lora_page_locked()
        layout, _ = flat_layout(manifest)
        checksum = weights_checksum(
            (item.name, local_view(item, parameters[item.name].data)) for item in layout
        )
        return {
            "manifest": manifest.to_json(),
            "checksum": checksum,
            "dtype": dtype_name(self._lora_config.lora_dtype),
            "max_rank": self._lora_config.max_lora_rank,
            "slots": len(manager.lora_index_to_id),
            "capacity": manager.capacity,
        }

    def lora_load(self, folder: str, adapter_id: int, checksum: str | None) -> LoraLoad:
        """Read an adapter, check it, and give it to vLLM. All or nothing on this rank.

        Args:
            folder: absolute.
            adapter_id: never used before.
            checksum: what the file must have; None accepts any.

        Returns:
            {"error": empty or why not, "checksum", "seconds": by phase}
        """
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        try:
            file = open_adapter(Path(folder), self._lora_geometry, self._lora_config.max_lora_rank)
            data = self._lora_read(file)
            seconds["read"], started = _lap(started)
            found = file.summary(data)
            if checksum not in (None, found.checksum):
                raise AdapterError(
                    f"{folder} has checksum {found.checksum}, {checksum} was announced: it was damaged or changed"
                )
            if found.not_finite:
                raise AdapterError(f"{folder} holds NaN or infinity")
            seconds["check"], started = _lap(started)
            manager = adapter_manager(self)
            if len(manager) >= manager.capacity:
                raise AdapterError(
                    f"{len(manager)} adapters are loaded, which --max-cpu-loras allows and no more"
                )
            try:
                with torch.inference_mode():
                    tensors = file.tensors(data.to(self._lora_config.lora_dtype))
                    add_adapter(manager, adapter_id, file.rank, file.scale, tensors)
                    if self._lora_device.type == "cuda":
                        torch.cuda.synchronize()
            except Exception:
                manager.remove_adapter(adapter_id)
                raise
            seconds["install"], _ = _lap(started)
        except (AdapterError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return {"error": reason, "checksum": "", "seconds": seconds}
        return {"error": "", "checksum": found.checksum, "seconds": seconds}

    def lora_remove(self, adapter_ids: list[int]) -> list[int]:
        """Forget adapters. Unknown ids are ignored.

        Returns the ids of all that are held then.
        """
        manager = adapter_manager(self)
        for adapter_id in adapter_ids:
            manager.remove_adapter(adapter_id)
        return sorted(manager.list_adapters())

    def _lora_page_locked(self) -> torch.Tensor:
        """Memory that a GPU copies from directly, which takes long to get: enough for an adapter of
        the largest rank.
        """
        if self._lora_device.type == "cpu":
            return torch.empty(0, dtype=torch.uint8)
        columns = sum(
            inputs + outputs for inputs, outputs in expected_shapes(self._lora_geometry).values()
        )
        num_bytes = (
            columns * self._lora_config.max_lora_rank * self._lora_config.lora_dtype.itemsize
        )
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _lora_read(self, file: AdapterFile) -> torch.Tensor:
        """The file's data as one flat tensor of its dtype, on the model's device."""
        if self._lora_device.type == "cpu":
            buffer = torch.empty(file.num_bytes, dtype=torch.uint8)
            file.read_into(buffer)
            return buffer.view(file.dtype)
        if self._lora_staging.numel() < file.num_bytes:
            self._lora_staging = torch.empty(
                file.num_bytes, dtype=torch.uint8, pin_memory=True
            )  # of a wider dtype
        buffer = self._lora_staging[: file.num_bytes]
        file.read_into(buffer)
        return buffer.to(self._lora_device).view(file.dtype)


def _lap(started: float) -> tuple[float, float]:
    now = time.perf_counter()
    return now - started, now


if TYPE_CHECKING:

    def _checked(worker: LoraWorkerExtension) -> LoraWorker:
        return worker
